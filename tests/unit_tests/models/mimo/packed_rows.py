# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of odd lengths with images of different counts, and how they are packed into rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from examples.mimo.common.steps import Microbatch
from examples.mimo.nemotron_vlm.data import SampleSource
from examples.mimo.nemotron_vlm.data.provider import Loading
from examples.mimo.nemotron_vlm.data.sample import IMAGE, IMAGES
from examples.mimo.nemotron_vlm.data.text import Text
from examples.mimo.nemotron_vlm.model.presets import tiny
from examples.mimo.training.sample_slices import SampleSlices
from megatron.core.models.mimo.bridge.topology import bridge_topology
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.setup.module_groups import Modules
from megatron.core.token_layout import pad_lengths
from tests.unit_tests.models.mimo.sample_plan import plan_of
from tests.unit_tests.test_utilities import Utils

SAMPLES_A_ROW = 4
LENGTHS_AND_TILES = (
    *((5, 1), (7, 1), (1, 0), (13, 3)),
    *((9, 2), (1, 0), (6, 1), (2, 0)),
    *((3, 0), (12, 2), (8, 1), (5, 1)),
    *((1, 0), (1, 0), (1, 0), (14, 2)),
)
FIRST_TEXT_TOKEN = 5


class OddSamples(SampleSource):
    """Random samples; number i has the i-th length and number of tiles."""

    def text(self, split: str, number: int) -> Text:
        """See `SampleSource`."""
        length, tiles = LENGTHS_AND_TILES[number % len(LENGTHS_AND_TILES)]
        preset = tiny()
        rng = torch.Generator().manual_seed(number)
        vocab = preset.language.vocab_size
        ids = torch.randint(FIRST_TEXT_TOKEN, vocab, (length + 1,), generator=rng)
        labels = ids[1:].clone()
        first = int(length > tiles * preset.images.tokens_per_tile)
        ids[first : first + tiles * preset.images.tokens_per_tile] = IMAGE
        return Text(ids[:-1], labels, (torch.rand(length, generator=rng) < 0.7).float())

    def tiles(self, split: str, number: int) -> torch.Tensor:
        """See `SampleSource`."""
        tiles, side = LENGTHS_AND_TILES[number % len(LENGTHS_AND_TILES)][1], tiny().images.tile
        rng = torch.Generator().manual_seed(number)
        return torch.randint(256, (tiles, 3, side, side), generator=rng, dtype=torch.uint8)


def pack(samples: list[Text]) -> tuple[dict[str, torch.Tensor], dict]:
    """Lay samples end to end: one row ``[1, S]``, and MimoModel's ``packing_kwargs`` for it."""
    row = {
        name: torch.cat([getattr(s, name) for s in samples])[None].to(Utils.device)
        for name in Text._fields
    }
    lengths = torch.tensor([0, *(len(s.input_ids) for s in samples)])
    bounds, longest = lengths.cumsum(0).to(Utils.device), int(lengths.max())
    return row, {
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "total_tokens": int(lengths.sum()),
    }


class PackedSlices:
    """A loading that packs the samples of a microbatch, without any padding of its own.

    With one sample it stays unpacked.

    Args:
        loading: the program's own.
        modules: grids of the modules.
    """

    def __init__(self, loading: Loading, modules: Modules) -> None:
        self._args, self._source = loading.args, loading.reader.source
        self._bridges = {IMAGES: bridge_topology(modules[IMAGES].grid, modules[LANGUAGE].grid)}
        plan = loading.plan
        self._slices = SampleSlices(plan.layouts, plan.encoder_parts[IMAGES], plan.language_dp)

    def training(self) -> Iterator[Microbatch]:
        """See `Loading`; one step."""
        micro_size = self._args.micro_batch_size
        dp = self._slices.layouts.language.dp
        count = self._args.global_batch_size // (micro_size * dp)
        for number in range(count):
            share, own = self._slices.indices(number, count, micro_size)
            row, packing = pack([self._source.text("train", i) for i in own])
            at_once = range(number * micro_size * dp, (number + 1) * micro_size * dp)
            encoded, consumed = (
                range(part.start - at_once.start, part.stop - at_once.start)
                for part in (share, own)
            )
            ids = [self._source.text("train", i).input_ids.numpy() for i in at_once]
            padded = [
                length
                for first in range(0, len(ids), micro_size)
                for length in self._padded([len(i) for i in ids[first : first + micro_size]])
            ]
            plan = plan_of(ids, padded, {IMAGES: IMAGE}, self._bridges, {IMAGES: encoded}, consumed)
            positions = torch.arange(row["input_ids"].shape[1], device=Utils.device)[None]
            tiles = torch.cat([self._source.tiles("train", i) for i in share]).to(Utils.device)
            batch = row | {
                "position_ids": positions,
                "modality_inputs": {IMAGES: {"radio": {"tiles": tiles}}},
                "batch_plan": plan,
                "samples": [],
                "sample_places": None,
            }
            yield batch | ({"packing_kwargs": packing} if len(own) > 1 else {})

    def _padded(self, row: list[int]) -> tuple[int, ...]:
        language = self._slices.layouts.language
        return pad_lengths(
            row, language.cp, language.tp if language.sequence_parallel else 1
        ).padded
