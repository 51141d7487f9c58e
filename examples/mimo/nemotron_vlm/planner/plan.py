# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A plan: two checked layouts, the recompute settings, and the images of the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import Layout, Layouts
from examples.mimo.nemotron_vlm.data.sample import IMAGES, most_tiles
from examples.mimo.nemotron_vlm.encoders import Encoder
from examples.mimo.nemotron_vlm.loop.encoder_schedule import schedule_of
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.planner.layers import RankBatch, inputs_of_sample
from examples.mimo.nemotron_vlm.planner.machine import Machine
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule
from megatron.core.models.mimo.schedule.bubble_plan import most_kept

if TYPE_CHECKING:  # Megatron's parser is slow to import
    from examples.mimo.nemotron_vlm.options.arguments import Options


@dataclass(frozen=True)
class Tiles:
    """Number of image tiles of a sample: mean and standard deviation."""

    mean: float
    deviation: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Tiles:
        """Parse N[:CHANCE],…, numbers of tiles with their chances, which need not add up to 1.

        Raises:
            UserError: a part is something else.
        """
        chances = {}
        for part in text.split(","):
            count, _, chance = part.partition(":")
            try:
                chances[int(count)] = float(chance or 1)
            except ValueError:
                raise UserError(f"--plan-tiles {text}: {part} is not N or N:CHANCE") from None
        if min(chances) < 0 or not min(chances.values()) > 0:
            raise UserError(f"--plan-tiles {text}: tiles must be 0 or more, chances above 0")
        total = sum(chances.values())
        mean = sum(count * chance for count, chance in chances.items()) / total
        square = sum(count**2 * chance for count, chance in chances.items()) / total
        return cls(mean, math.sqrt(max(0.0, square - mean**2)))

    def check(self, preset: VLMPreset, seq_length: int) -> None:
        """Refuse more tiles than a sample has tokens for.

        Raises:
            UserError: they do not fit.
        """
        tokens = preset.images.tokens_per_tile
        if self.mean * tokens > seq_length:
            reason = f"{self.mean:g} tiles of {tokens} tokens do not fit --seq-length {seq_length}"
            raise UserError(reason)


@dataclass(frozen=True)
class Plan:
    """A plan, whose time and memory the planner predicts."""

    preset: VLMPreset
    layouts: Layouts
    images: Tiles  # of a sample
    recompute: str = "none"  # or moe (Megatron's selective recompute of MoE layers), or full
    schedule: EncoderSchedule = EncoderSchedule()  # of a colocated encoder

    @property
    def encoded_at_once(self) -> int:
        """Microbatches whose images are encoded at once: all of a step in three phases."""
        if self.layouts.non_colocated:
            return 1
        return self.schedule.at_once(self.layouts.language.pp, self.layouts.num_microbatches)

    @property
    def encoded_and_kept(self) -> int:
        """Microbatches for whose images the encoder keeps activations at the same time."""
        if not self.schedule.in_bubbles:
            return self.encoded_at_once
        size = self.schedule.macro_batch
        kept = most_kept(self.layouts.language.pp, size) * size
        return min(kept, self.layouts.num_microbatches)

    @property
    def encoders(self) -> list[tuple[Encoder, Layout]]:
        """The encoders' entries and layouts."""
        return list(zip(self.preset.encoders, self.layouts.encoders, strict=True))

    def inputs_of_sample(self, encoder: Encoder) -> float:
        """Return the mean number of an encoder's inputs in a sample."""
        return inputs_of_sample(encoder.name, self.images.mean)

    def most_inputs(self, encoder: Encoder, own: Layout, microbatches: int = 1) -> float:
        """Return the inputs of ``microbatches`` microbatches on the encoder rank that has most of
        them.

        Colocated, inputs are divided evenly. Non-colocated, a rank encodes whole samples: the
        largest of dp sums is estimated as that of normal variables, mean + deviation · sqrt(2 ln
        dp).
        """
        lay = self.layouts
        samples = microbatches * lay.batch.micro_size * lay.language.dp / own.dp
        mean = samples * self.inputs_of_sample(encoder)
        if not lay.non_colocated:
            return float(math.ceil(mean))
        deviation = self.images.deviation if encoder.name == IMAGES else 0.0
        return mean + deviation * math.sqrt(samples * 2 * math.log(own.dp))

    def rank_batch(self, machine: Machine) -> RankBatch:
        """Return a microbatch as a rank of the language model processes it."""
        lay, batch = self.layouts.language, self.layouts.batch
        return RankBatch(
            self.preset.language, lay, batch.micro_size, batch.seq_length, machine.fused
        )


def plan_of(options: Options) -> Plan:
    """Return the plan for the program's options, with as many tiles as a sample can have."""
    args = options.args
    recompute = args.recompute_granularity or "none"
    if recompute == "selective":
        recompute = "moe" if "moe" in args.recompute_modules else "none"
    images = most_that_fit(options.preset, args.seq_length)
    return Plan(options.preset, options.layouts, images, recompute, schedule_of(args))


def most_that_fit(preset: VLMPreset, seq_length: int) -> Tiles:
    """Return the tiles of a sample with as many as its tokens allow, as mock samples have."""
    return Tiles(max(1, most_tiles(preset.images.tokens_per_tile, seq_length)))
