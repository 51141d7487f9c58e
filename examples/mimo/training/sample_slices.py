# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Slices of the global batch that a rank's colocated modules take, microbatch by microbatch.

The bridge needs consecutive samples on each DP rank of either module. Without a pipeline it runs
once per microbatch: microbatch ``i`` is a run of ``micro_size · language.dp`` consecutive samples,
which each module cuts into equal slices. With a pipeline it runs once per step: each module cuts
the whole batch into slices, and a rank's slice into microbatches; an encoder rank may have fewer
samples than there are microbatches, and then has none in some of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from examples.mimo.common.layout import Layouts


@dataclass(frozen=True)
class SampleSlices:
    """The slices of one rank.

    Args:
        layouts: layouts of both modules.
        encoder_part: index of the slice that this rank encodes.
        language_dp: this rank's DP coordinate in the language model's grid.
    """

    layouts: Layouts
    encoder_part: int
    language_dp: int

    def indices(self, number: int, count: int, micro_size: int) -> tuple[range, range]:
        """Return the indices into the batch that the encoder and the language model take on this
        rank.

        Args:
            number: number of the microbatch.
            count: number of microbatches of the batch.
            micro_size: samples of a microbatch that a DP rank of the language model takes.
        """
        dp = self.layouts.language.dp

        def part(slice_: int, slices: int) -> range:
            if self.layouts.language.pp == 1:
                size = micro_size * dp // slices
                start = (number * slices + slice_) * size
                return range(start, start + size)
            own = micro_size * dp * count // slices
            first, end = (place * own // count for place in (number, number + 1))
            return range(slice_ * own + first, slice_ * own + end)

        return part(self.encoder_part, self.layouts.encoder.dp), part(self.language_dp, dp)
