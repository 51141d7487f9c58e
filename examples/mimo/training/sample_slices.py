# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which samples of the global batch a rank's colocated modules take, microbatch by microbatch.

The bridge wants consecutive samples on each DP rank of either module. Without a pipeline it works
once a microbatch: microbatch ``i`` is a run of ``micro_size · language.dp`` consecutive samples,
which each module cuts into equal slices. With a pipeline it works once a step: each module cuts the
whole batch, and a rank's slice into microbatches; an encoder's rank may have fewer samples than
there are microbatches, and then none in some.
"""

from __future__ import annotations

from dataclasses import dataclass

from examples.mimo.nemotron_vlm.layout import Layouts


@dataclass(frozen=True)
class SampleSlices:
    """The slices of one rank.

    Args:
        layouts: of both modules.
        encoder_part: which slice this rank encodes.
        language_dp: this rank's DP coordinate in the language model's grid.
    """

    layouts: Layouts
    encoder_part: int
    language_dp: int

    def indices(self, number: int, count: int, micro_size: int) -> tuple[range, range]:
        """Indices into the batch that the encoder and the language model take here.

        Args:
            number: of the microbatch.
            count: microbatches of the batch.
            micro_size: samples that a DP rank of the language model takes of one.
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
