# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of odd lengths with images of different counts, and how they are packed into rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from examples.mimo.nemotron_vlm.batches import BatchPlan, Microbatch, collate
from examples.mimo.nemotron_vlm.data.sample import IMAGE, Sample
from examples.mimo.nemotron_vlm.layout import Layouts
from examples.mimo.nemotron_vlm.model import IMAGES
from examples.mimo.nemotron_vlm.presets import tiny
from megatron.core.models.mimo.modality_rows import HostTokens

SAMPLES_A_ROW = 4
LENGTHS_AND_TILES = (
    *((5, 1), (7, 1), (1, 0), (13, 3)),
    *((9, 2), (1, 0), (6, 1), (2, 0)),
    *((3, 0), (12, 2), (8, 1), (5, 1)),
    *((1, 0), (1, 0), (1, 0), (14, 2)),
)
FIRST_TEXT_TOKEN = 5


class OddSamples:
    """A source of random samples; number i has the i-th length and number of tiles."""

    tiles_per_sample = 1.0

    def sample(self, split: str, number: int) -> Sample:
        """See `SampleSource`."""
        length, tiles = LENGTHS_AND_TILES[number % len(LENGTHS_AND_TILES)]
        preset = tiny()
        rng = torch.Generator().manual_seed(number)
        vocab = preset.language.vocab_size
        ids = torch.randint(FIRST_TEXT_TOKEN, vocab, (length + 1,), generator=rng)
        labels = ids[1:].clone()
        first = int(length > tiles * preset.encoder.tokens_per_tile)
        ids[first : first + tiles * preset.encoder.tokens_per_tile] = IMAGE
        pixels = torch.rand(tiles, 3, preset.encoder.tile, preset.encoder.tile, generator=rng)
        loss_mask = (torch.rand(length, generator=rng) < 0.7).float()
        return Sample(pixels, ids[:-1], labels, loss_mask)


def pack(samples: list[Sample], device) -> tuple[Sample, dict]:
    """Lay samples end to end: one long sample, and MimoModel's ``packing_kwargs`` for it."""
    names = ("tiles", "input_ids", "labels", "loss_mask")
    row = Sample(**{name: torch.cat([getattr(s, name) for s in samples]) for name in names})
    lengths = torch.tensor([0, *(len(s.input_ids) for s in samples)])
    bounds, longest = lengths.cumsum(0).to(device), int(lengths.max())
    return row, {
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "total_tokens": len(row.input_ids),
    }


class PackedPlan:
    """A `BatchPlan` that packs the samples of a microbatch; with one sample it stays unpacked."""

    def __init__(self, plan: BatchPlan) -> None:
        self.plan = plan

    def microbatches(
        self, source: OddSamples, split: str, first: int, count: int, micro_size: int, device
    ) -> Iterator[Microbatch]:
        """See `BatchPlan`."""
        for number in range(count):
            encoder, language = (
                [source.sample(split, first + i) for i in part]
                for part in self.plan.indices(number, count, micro_size)
            )
            row, packing = pack(language, device)
            batch = collate(encoder, [row], device) | {"samples": []}
            ids = {IMAGES: [sample.input_ids for sample in encoder]}
            batch["host_tokens"] = HostTokens(ids, [sample.input_ids for sample in language])
            if len(language) > 1:
                batch["packing_kwargs"] = packing
            yield batch

    @property
    def layouts(self) -> Layouts:
        """Of the plan."""
        return self.plan.layouts
