# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""When colocated encoders run, and what they keep."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EncoderSchedule:
    """Settings that the schedule, the data loader and the planner of layouts read.

    Args:
        macro_batch: microbatches that are encoded at once without a pipeline of the language model,
            or in its bubbles.
        in_bubbles: encode where stages of the pipeline would wait, instead of a whole step before
            the pipeline.
        recompute: keep no encoder activations; in the backward run the encoders again, this many
            microbatches at a time. None keeps all.
        share: the encoders' share of a step's work, by which the bubbles are filled.
    """

    macro_batch: int = 1
    in_bubbles: bool = False
    recompute: int | None = None
    share: float = 0.5

    def at_once(self, pp: int, microbatches: int) -> int:
        """Return the number of microbatches that are encoded at once."""
        return microbatches if self.encodes_all(pp) else self.macro_batch

    def encodes_all(self, pp: int) -> bool:
        """Return whether all microbatches of a step are encoded before its pipeline."""
        return pp > 1 and not self.in_bubbles
