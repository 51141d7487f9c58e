# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""When colocated encoders run, and what they keep."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EncoderSchedule:
    """Settings that the schedule, the data loader and the planner of layouts read.

    Args:
        macro_batch: microbatches that are encoded at once without a pipeline of the language model;
            with one, all of a step are.
        recompute: keep no encoder activations; in the backward run the encoders again, this many
            microbatches at a time. None keeps all.
    """

    macro_batch: int = 1
    recompute: int | None = None

    def at_once(self, pp: int, microbatches: int) -> int:
        """Return the number of microbatches that are encoded at once."""
        return microbatches if pp > 1 else min(self.macro_batch, microbatches)
