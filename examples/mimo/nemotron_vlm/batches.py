# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which samples of the global batch a rank's modules take, microbatch by microbatch.

The bridge wants consecutive samples on each DP rank of either module. Non-colocated, and without a
pipeline, it works once a microbatch: microbatch ``i`` is a run of ``micro_size · language.dp``
consecutive samples, which each module cuts into equal slices. Colocated with a pipeline it works
once a step: each module cuts the whole batch, and a rank's slice into microbatches; an encoder's
rank may have fewer samples than there are microbatches, and then none in some. Which slice an
encoder's rank takes is the bridge's choice: the one with most of what the rank's language model
consumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from examples.mimo.nemotron_vlm.data import Sample, SampleSource
from examples.mimo.nemotron_vlm.data.sample import IMAGE
from examples.mimo.nemotron_vlm.errors import UserError
from examples.mimo.nemotron_vlm.layout import Layouts
from examples.mimo.nemotron_vlm.model import IMAGES
from megatron.core.models.mimo.modality_rows import HostTokens

Microbatch = dict[str, object]


@dataclass(frozen=True)
class BatchPlan:
    """The slices of one rank.

    Args:
        layouts: of both modules.
        encoder_part: which slice this rank encodes; None if it has no encoder.
        language_dp: this rank's DP coordinate in the language model's grid, None outside of it.
        tokens_per_tile: image tokens that a sample has for each of its tiles.
    """

    layouts: Layouts
    encoder_part: int | None
    language_dp: int | None
    tokens_per_tile: int

    def indices(self, number: int, count: int, micro_size: int) -> tuple[range, range]:
        """Indices into the batch that the encoder and the language model take here.

        Args:
            number: of the microbatch.
            count: microbatches of the batch.
            micro_size: samples that a DP rank of the language model takes of one.
        """
        dp = self.layouts.language.dp

        def part(slice_: int | None, slices: int) -> range:
            if slice_ is None:
                return range(0)
            if self.layouts.non_colocated or self.layouts.language.pp == 1:
                size = micro_size * dp // slices
                start = (number * slices + slice_) * size
                return range(start, start + size)
            own = micro_size * dp * count // slices
            first, end = (place * own // count for place in (number, number + 1))
            return range(slice_ * own + first, slice_ * own + end)

        return (
            part(self.encoder_part, self.layouts.encoder.dp),
            part(self.language_dp, self.layouts.language.dp),
        )

    def microbatches(
        self,
        source: SampleSource,
        split: str,
        first: int,
        count: int,
        micro_size: int,
        device: torch.device | str,
    ) -> Iterator[Microbatch]:
        """This rank's microbatches of one batch, in order; colocated ones with ``host_tokens``.

        ``samples`` in each are the numbers of the samples that the language model takes.

        Args:
            source: of samples.
            split: of the source.
            first: number of the batch's first sample.
            count, micro_size: as for :meth:`indices`.
            device: of the tensors.

        Raises:
            UserError: a sample has another number of image tokens than its tiles become.
        """
        for number in range(count):
            parts = self.indices(number, count, micro_size)
            encoder_part, language_part = ([first + i for i in part] for part in parts)
            taken = {*encoder_part, *language_part}
            samples = {i: self._sample(source, split, i) for i in sorted(taken)}
            encoded = [samples[i] for i in encoder_part]
            consumed = [samples[i] for i in language_part]
            batch = collate(encoded, consumed, device) | {"samples": language_part}
            if not self.layouts.non_colocated:
                ids = {IMAGES: [sample.input_ids for sample in encoded]}
                batch["host_tokens"] = HostTokens(ids, [s.input_ids for s in consumed])
            yield batch

    def _sample(self, source: SampleSource, split: str, number: int) -> Sample:
        sample = source.sample(split, number)
        found = int((sample.input_ids == IMAGE).sum())
        wanted = len(sample.tiles) * self.tokens_per_tile
        if found != wanted:
            raise UserError(
                f"sample {number} of {split} has {found} image tokens for {len(sample.tiles)} "
                f"tiles of {self.tokens_per_tile}, which need {wanted}; correct the data",
                dist.get_rank() if dist.is_initialized() else None,
            )
        return sample


def collate(
    encoder_samples: list[Sample], language_samples: list[Sample], device: torch.device | str
) -> Microbatch:
    """Stack samples into MimoModel's keyword arguments.

    Args:
        encoder_samples: empty on ranks without the encoder.
        language_samples: empty on ranks without the language model, where the tokens are those of
            the encoder's samples.

    Returns:
        input_ids, labels, position_ids [b, S] int64; loss_mask [b, S] float32; modality_inputs
        with the tiles [n, 3, H, W] of the encoder's samples, one after the other; None without
        samples.
    """
    samples = language_samples or encoder_samples
    stacked = {
        name: torch.stack([getattr(s, name) for s in samples]).to(device)
        for name in ("input_ids", "labels", "loss_mask")
    }
    positions = torch.arange(stacked["input_ids"].shape[1], device=device)
    images = None
    if encoder_samples:
        tiles = torch.cat([s.tiles for s in encoder_samples]).to(device)
        images = {"radio": {"tiles": tiles}}
    return {
        **stacked,
        "position_ids": positions.expand_as(stacked["input_ids"]),
        "modality_inputs": {IMAGES: images},
    }
