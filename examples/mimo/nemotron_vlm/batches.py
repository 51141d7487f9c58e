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

from dataclasses import dataclass

import torch

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

    def indices(self, microbatch: int) -> tuple[range, range]:
        """Indices into the global batch that the encoder and the language model take here."""
        count = self.layouts.num_microbatches

        def part(slice_: int | None, slices: int) -> range:
            if slice_ is None:
                return range(0)
            if self.layouts.non_colocated or self.layouts.language.pp == 1:
                size = self.layouts.batch.global_size // count // slices
                number = microbatch * slices + slice_
                return range(number * size, (number + 1) * size)
            own = self.layouts.batch.global_size // slices
            first, end = (number * own // count for number in (microbatch, microbatch + 1))
            return range(slice_ * own + first, slice_ * own + end)

        return (
            part(self.encoder_part, self.layouts.encoder.dp),
            part(self.language_dp, self.layouts.language.dp),
        )

    def microbatches(
        self, source: SampleSource, split: str, step: int, device: torch.device | str
    ) -> list[Microbatch]:
        """This rank's microbatches of one step, in order; colocated ones with ``host_tokens``.

        Raises:
            UserError: a sample has another number of image tokens than its tiles become.
        """
        return [
            self._microbatch(source, split, step, number, device)
            for number in range(self.layouts.num_microbatches)
        ]

    def _microbatch(
        self, source: SampleSource, split: str, step: int, number: int, device: torch.device | str
    ) -> Microbatch:
        encoder_part, language_part = self.indices(number)
        samples = {}
        for index in sorted({*encoder_part, *language_part}):
            sample = samples[index] = source.sample(split, step, index)
            found = int((sample.input_ids == IMAGE).sum())
            wanted = len(sample.tiles) * self.tokens_per_tile
            if found != wanted:
                raise UserError(
                    f"sample {index} of {split} step {step} has {found} image tokens for "
                    f"{len(sample.tiles)} tiles of {self.tokens_per_tile}, which need {wanted}; "
                    "mend the data"
                )
        encoded, consumed = ([samples[i] for i in part] for part in (encoder_part, language_part))
        batch = collate(encoded, consumed, device)
        if not self.layouts.non_colocated:
            ids = {IMAGES: [sample.input_ids for sample in encoded]}
            batch["host_tokens"] = HostTokens(ids, [sample.input_ids for sample in consumed])
        return batch


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
