# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A plan: checked layouts, the recompute settings, and the inputs of the batch."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from examples.mimo.common.layout import Layout, Layouts
from examples.mimo.nemotron_vlm.encoders import Encoder
from examples.mimo.nemotron_vlm.loop.encoder_schedule import schedule_of
from examples.mimo.nemotron_vlm.model.part_settings import ModelPart
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.planner.inputs import Inputs, Mean, inputs_of, kept_of, mean_of
from examples.mimo.nemotron_vlm.planner.layers import RankBatch
from examples.mimo.nemotron_vlm.planner.machine import Machine
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule

if TYPE_CHECKING:  # Megatron's parser is slow to import
    from examples.mimo.nemotron_vlm.options.arguments import Options


class StateBytes(NamedTuple):
    """Bytes that a GPU holds for each parameter: gradient, and optimizer state of its shard; and
    for each logit, None for those of Megatron's loss."""

    gradient: float = 4.0
    optimizer: float = 12.0
    logit: float | None = None


@dataclass(frozen=True)
class Plan:
    """A plan, whose time and memory the planner predicts."""

    preset: VLMPreset
    layouts: Layouts
    inputs: tuple[Inputs, ...]  # of a row, for each encoder
    recompute: str = "none"  # or moe (Megatron's selective recompute of MoE layers), or full
    schedule: EncoderSchedule = EncoderSchedule()  # of a colocated encoder
    state: StateBytes = StateBytes()
    frozen: frozenset[ModelPart] = frozenset()

    @property
    def encoded_at_once(self) -> int:
        """Microbatches whose images are encoded at once, and their activations kept: with a
        pipeline all of a step."""
        if self.layouts.non_colocated:
            return 1
        return self.schedule.at_once(self.layouts.language.pp, self.layouts.num_microbatches)

    @property
    def encoders(self) -> list[tuple[Encoder, Layout]]:
        """The encoders' entries and layouts."""
        return list(zip(self.preset.encoders, self.layouts.encoders, strict=True))

    def inputs_of(self, encoder: Encoder) -> Inputs:
        """Return an encoder's inputs of a row."""
        return self.inputs[self.preset.encoders.index(encoder)]

    def mean_of(self, encoder: Encoder) -> Mean:
        """Return the means of an encoder's inputs."""
        return mean_of(encoder, self.inputs_of(encoder), self.preset.language.hidden_size)

    def kept_of(
        self, encoder: Encoder, own: Layout, first: bool = True, last: bool = True
    ) -> float:
        """Return the mean elements that a rank of one stage keeps of an encoder's input.

        Of one that is frozen, the projector's are left; nothing else before it is trained.
        """
        inputs = self.inputs_of(encoder)
        if (encoder.name, "encoder") in self.frozen:
            if (encoder.name, "projector") in self.frozen:
                return 0.0
            encoder, first = replace(encoder, layers=0), False
        return kept_of(encoder, inputs, own, first, last)

    def most_inputs(self, encoder: Encoder, own: Layout, microbatches: int = 1) -> float:
        """Return the inputs of ``microbatches`` microbatches on the encoder rank that has most of
        them.

        Colocated, inputs are divided evenly. Non-colocated, a rank encodes whole samples: the
        largest of dp sums is estimated as that of normal variables, mean + deviation · sqrt(2 ln
        dp).
        """
        lay = self.layouts
        samples = microbatches * lay.batch.micro_size * lay.language.dp / own.dp
        inputs = self.inputs_of(encoder)
        mean = samples * inputs.mean
        if not lay.non_colocated:
            return float(math.ceil(mean))
        return mean + inputs.deviation * math.sqrt(samples * 2 * math.log(own.dp))

    def rank_batch(self, machine: Machine) -> RankBatch:
        """Return a microbatch as a rank of the language model processes it."""
        lay, batch = self.layouts.language, self.layouts.batch
        return RankBatch(
            self.preset.language, lay, batch.micro_size, batch.seq_length, machine.fused
        )


def plan_of(options: Options) -> Plan:
    """Return the plan for the program's options."""
    args = options.args
    recompute = args.recompute_granularity or "none"
    if recompute == "selective":
        recompute = "moe" if "moe" in args.recompute_modules else "none"
    inputs, schedule = inputs_of(args, options.preset), schedule_of(args)
    state = state_of(args, args.bf16 or args.fp16)
    how = recompute, schedule, state, options.parts.frozen
    return Plan(options.preset, options.layouts, inputs, *how)


def state_of(args: Namespace, in_16_bits: bool) -> StateBytes:
    """Return what Adam of Megatron's distributed optimizer keeps for each parameter.

    It keeps two moments and, if the parameters have 16 bits, the weight, each in fp32 unless the
    options of the precision-aware optimizer say otherwise.
    """
    narrow = args.grad_reduce_in_bf16 or args.main_grads_dtype != torch.float32
    narrow = narrow or (args.fp16 and not args.accumulate_allreduce_grads_in_fp32)
    kept = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
    kept += args.main_params_dtype.itemsize * in_16_bits
    on_gpu = 1 - args.optimizer_offload_fraction * args.optimizer_cpu_offload
    gradient = 2.0 if narrow and in_16_bits else 4.0
    # The kernel keeps logits and their gradient.
    logit = 2 * (2.0 if in_16_bits else 4.0) if args.loss_kernel else None
    return StateBytes(gradient, on_gpu * kept, logit)


def split_words(words: list[str], names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command line that are of these options, and those of all others."""
    own, others = [], []
    part = others
    for word in words:
        if word.startswith("--"):  # its values follow
            part = own if word.split("=")[0] in names else others
        part.append(word)
    return own, others
