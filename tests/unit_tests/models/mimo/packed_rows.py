# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of odd lengths with images of different counts, and how they are packed into rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from examples.mimo.common.steps import Microbatch
from examples.mimo.nemotron_vlm.data import SampleSource
from examples.mimo.nemotron_vlm.data.provider import Loading
from examples.mimo.nemotron_vlm.data.sample import IMAGE
from examples.mimo.nemotron_vlm.data.text import Text
from examples.mimo.nemotron_vlm.model.model import ENCODER, IMAGES
from examples.mimo.nemotron_vlm.model.presets import tiny
from examples.mimo.training.sample_slices import SampleSlices
from megatron.core.context_parallel_layout import pad_lengths
from megatron.core.models.mimo.bridge.batch_plan import BatchPlan
from megatron.core.models.mimo.bridge.plan import AtomRows
from megatron.core.models.mimo.bridge.topology import bridge_topology
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.setup.module_groups import Modules
from tests.unit_tests.models.mimo.sample_rows import rows_of_samples
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
        first = int(length > tiles * preset.encoder.tokens_per_tile)
        ids[first : first + tiles * preset.encoder.tokens_per_tile] = IMAGE
        return Text(ids[:-1], labels, (torch.rand(length, generator=rng) < 0.7).float())

    def tiles(self, split: str, number: int) -> torch.Tensor:
        """See `SampleSource`."""
        tiles, side = LENGTHS_AND_TILES[number % len(LENGTHS_AND_TILES)][1], tiny().encoder.tile
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
        self._topology = bridge_topology(modules[IMAGES].grid, modules[LANGUAGE].grid)
        plan = loading.plan
        self._slices = SampleSlices(plan.layouts, plan.encoder_part, plan.language_dp)

    def training(self) -> Iterator[Microbatch]:
        """See `Loading`; one step."""
        micro_size = self._args.micro_batch_size
        dp = self._slices.layouts.language.dp
        count = self._args.global_batch_size // (micro_size * dp)
        for number in range(count):
            share, own = self._slices.indices(number, count, micro_size)
            at_once = range(number * micro_size * dp, (number + 1) * micro_size * dp)
            row, packing = pack([self._source.text("train", i) for i in own])
            rank = dist.get_rank()
            plan = BatchPlan(
                {IMAGES: self._rows(self._topology.encodes(rank), share, at_once)},
                {IMAGES: self._rows(self._topology.consumes(rank), own, at_once)},
                tuple(len(self._source.text("train", i).input_ids) for i in own),
            )
            positions = torch.arange(row["input_ids"].shape[1], device=Utils.device)[None]
            tiles = torch.cat([self._source.tiles("train", i) for i in share]).to(Utils.device)
            batch = row | {
                "position_ids": positions,
                "modality_inputs": {IMAGES: {ENCODER: {"tiles": tiles}}},
                "batch_plan": plan,
                "samples": [],
                "sample_places": None,
            }
            yield batch | ({"packing_kwargs": packing} if len(own) > 1 else {})

    def _rows(self, run: range, places: range, at_once: range) -> AtomRows:
        language, size = self._slices.layouts.language, self._args.micro_batch_size
        sp = language.tp if language.sequence_parallel else 1

        def padded(sample: int) -> int:
            first = sample // size * size
            row = range(first, first + size)
            lengths = [len(self._source.text("train", i).input_ids) for i in row]
            return pad_lengths(lengths, language.cp, sp).padded[sample - first]

        ids = [self._source.text("train", i).input_ids.numpy() for i in places]
        return rows_of_samples(
            self._topology,
            run,
            [i - at_once.start for i in places],
            len(at_once),
            [tokens == IMAGE for tokens in ids],
            [padded(i) for i in places],
        )
