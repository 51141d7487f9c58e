# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A task is the run to plan; a plan is one way to run it, with checked layouts."""

from argparse import Namespace
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from examples.mimo.common.layout import PLACEMENTS, Layout, Layouts
from examples.mimo.nemotron_vlm.model.part_settings import ModelPart
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options.run import Run
from examples.mimo.nemotron_vlm.planner.inputs import Inputs, inputs_of
from examples.mimo.nemotron_vlm.planner.machine import Machine, find_machine
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule
from megatron.core.models.mimo.joint_optimizer.remainders import keeps_halves


class StateBytes(NamedTuple):
    """Bytes for each parameter: its gradient, and the optimizer's state of the rank's shard, on the
    GPU, on the host and in a checkpoint; and for each logit, None with Megatron's loss."""

    gradient: float
    optimizer: float
    on_host: float
    saved: float
    logit: float | None


@dataclass(frozen=True, eq=False)
class Task:
    """The run to plan.

    options: the run, whose layouts do not count. world: number of GPUs. machine: their figures.
    inputs: of each encoder, in the preset's order. placements: those that may be chosen.
    """

    options: Run
    world: int
    machine: Machine
    inputs: tuple[Inputs, ...]
    state: StateBytes
    placements: tuple[str, ...] = PLACEMENTS

    @property
    def preset(self) -> VLMPreset:
        """The model."""
        return self.options.preset

    @property
    def inert(self) -> frozenset[ModelPart]:
        """Frozen parts without adapters."""
        frozen, adapters = self.options.parts.frozen, self.options.adapters
        return frozen - (adapters.parts if adapters else frozenset())


class Stage(NamedTuple):
    """A stage of the pipeline.

    encoder: the encoder's place in the preset; None for the language model's stages. number: the
    stage's place in its module's own pipeline.
    """

    encoder: int | None
    number: int
    name: str


@dataclass(frozen=True)
class Plan:
    """One way to run a task."""

    task: Task
    layouts: Layouts
    recompute: str = "none"  # or moe (Megatron's selective recompute of MoE layers), or full
    schedule: EncoderSchedule = EncoderSchedule()  # of colocated encoders

    @property
    def encoded_at_once(self) -> int:
        """Microbatches whose inputs are encoded at once."""
        if self.layouts.non_colocated:
            return 1
        return self.schedule.at_once(self.layouts.language.pp, self.layouts.num_microbatches)

    @property
    def encoders(self) -> list[tuple[Inputs, Layout]]:
        """The inputs and the layout of each encoder."""
        return list(zip(self.task.inputs, self.layouts.encoders, strict=True))

    def rows(self, own: Layout) -> float:
        """Return the rows of a microbatch whose inputs an encoder's rank encodes."""
        return self.layouts.batch.micro_size * self.layouts.language.dp / own.dp


@cache
def stages_of_pipeline(layouts: Layouts) -> list[Stage]:
    """Return the pipeline's stages; those of encoders on ranks of their own come first."""
    stages = [
        Stage(place, number, f"encoder {place}, {number}")
        for place, lay in enumerate(layouts.encoders if layouts.non_colocated else ())
        for number in range(lay.pp)
    ]
    stages += [Stage(None, number, f"stage {number}") for number in range(layouts.language.pp)]
    return stages if len(stages) > 1 else [stages[0]._replace(name="all ranks")]


def task_of(options: Run, world: int, **figures: object) -> Task:
    """Return the run that options describe, on ``world`` GPUs of the kind that they name.

    Args:
        figures: of the machine, in place of the table's.
    """
    args = options.args
    asked = {"gpus_per_node": args.plan_gpus_per_node}
    asked["has_graphs"] = args.cuda_graph_impl == "local"
    machine = find_machine(args.plan_gpu, **asked | figures)
    inputs = inputs_of(args, options.preset)
    return Task(options, world, machine, inputs, _state_of(args, machine.precision == 2))


def plan_of(options: Run) -> Plan:
    """Return the plan that options ask for, on the GPUs that they name; nothing is reserved."""
    args, precision = options.args, 2 if options.args.bf16 or options.args.fp16 else 4
    recompute = args.recompute_granularity or "none"
    if recompute == "selective":
        recompute = "moe" if "moe" in args.recompute_modules else "none"
    task = task_of(options, args.world_size, precision=precision, reserved_bytes=0.0)
    return Plan(task, options.layouts, recompute, options.schedule)


def _state_of(args: Namespace, in_16_bits: bool) -> StateBytes:
    """Return what Adam of Megatron's distributed optimizer keeps for each parameter.

    It keeps two moments and, if the parameters have 16 bits, the weight, each in fp32 unless the
    options of the precision-aware optimizer say otherwise. Beside bf16 parameters, that one may
    keep the other half of fp32 weights. Checkpoints have whole weights, and moments in bf16 or
    fp32.
    """
    narrow = args.grad_reduce_in_bf16 or args.main_grads_dtype != torch.float32
    narrow = narrow or (args.fp16 and not args.accumulate_allreduce_grads_in_fp32)
    moments = args.exp_avg_dtype, args.exp_avg_sq_dtype
    kept = sum(moment.itemsize for moment in moments)
    saved = 4 + sum(2 if moment == torch.bfloat16 else 4 for moment in moments)
    kept += (2 if keeps_halves(args) else args.main_params_dtype.itemsize) * in_16_bits
    on_host = kept * args.optimizer_offload_fraction * args.optimizer_cpu_offload
    gradient = 2.0 if narrow and in_16_bits else 4.0
    # The kernel keeps logits and their gradient.
    logit = 2 * (2.0 if in_16_bits else 4.0) if args.loss_kernel else None
    return StateBytes(gradient, kept - on_host, on_host, saved, logit)
