# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A task is the run to plan, with the inputs of its data; a plan is one way to run it, with checked
layouts.

The survey gives the sizes of images, clips and sounds in the first rows that training would read.
Where the shards are not there, rows are full of images, as mock samples are; ``--data digits:N``
has N tiles a row.
"""

import math
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import PLACEMENTS, Layout, Layouts
from examples.mimo.nemotron_vlm.data import DIGITS, SOURCES, digits_of_strip, make_source, path_of
from examples.mimo.nemotron_vlm.data.rows import SIZE, Packing, Rows, squares_of
from examples.mimo.nemotron_vlm.model.encoders import Encoder
from examples.mimo.nemotron_vlm.model.names import IMAGES
from examples.mimo.nemotron_vlm.model.part_settings import ModelPart
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options.run import Run
from examples.mimo.nemotron_vlm.planner.machine import Machine, find_machine
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule
from megatron.core.models.mimo.joint_optimizer.remainders import keeps_halves


class Inputs:
    """An encoder's inputs in some rows of tokens, which stand for all rows.

    Args:
        rows: sizes of the inputs of each row, int64 [inputs].
    """

    def __init__(self, encoder: Encoder, rows: list[np.ndarray]) -> None:
        self.encoder, self.sizes, self._rows = encoder, np.concatenate(rows), len(rows)
        self._row = np.repeat(np.arange(len(rows)), [len(row) for row in rows])

    def mean(self, values: np.ndarray, rows: float = 1.0) -> float:
        """Return the mean of ``rows`` rows for values of each input, [inputs]; half a row has at
        least one input."""
        found = rows * float(values.sum()) / self._rows
        return max(found, float(values.mean())) if rows < 1 and len(values) else found

    def most(self, values: np.ndarray, rows: float) -> float:
        """Return the most that ``rows`` rows in succession have, for values of each input.

        Half a row has half of its inputs, and at least one.
        """
        if not len(values):
            return 0.0
        count = math.ceil(rows)
        of_row = np.bincount(self._row, values, self._rows)
        before = np.cumsum([0.0, *np.resize(of_row, max(count, self._rows))])
        sums = before[count:] - before[:-count]
        return float(max(sums.max() * rows / count, values.max()))

    def most_kept(
        self, own: Layout, rows: float, frozen: frozenset[ModelPart], stage: int = 0
    ) -> float:
        """Return the most elements that a rank of a stage keeps of the inputs of ``rows`` rows.

        A frozen encoder keeps nothing, but its projector may still be trained.
        """
        encoder, first, last = self.encoder, stage == 0, stage == own.pp - 1
        if (encoder.name, "encoder") in frozen:
            if (encoder.name, "projector") in frozen:
                return 0.0
            encoder, first = replace(encoder, layers=0), False
        return self.most(encoder.kept(self.sizes, own, first, last), rows)


def rows_of(args: Namespace, preset: VLMPreset) -> tuple[tuple[Inputs, ...], float]:
    """Return the inputs of each encoder, and the mean of rows' squared lengths of samples.

    Raises:
        UserError: the data cannot be opened, or the inputs do not fit the sequence.
    """
    path = path_of(args.data)
    is_there = Path(path).exists() if path else args.data.partition(":")[0] not in SOURCES
    opened = args if is_there else Namespace(**vars(args) | {"data": "mock"})
    packing = Packing(args.pack_window, args.sample_multiple) if args.pack and is_there else None
    tiles = args.data.partition(DIGITS)[2]
    rows = Rows(make_source(opened, preset), "train", args.seq_length, packing, args.seed)
    first, width = rows.first(), preset.language.hidden_size
    found = [
        Inputs(each, [np.full(digits_of_strip(tiles), each.usual)])  # drawing scans would take long
        if tiles and each.name == IMAGES
        else Inputs(each, [row[:, SIZE] for row in rows.inputs(first, each, width)])
        for each in preset.encoders
    ]
    tokens = sum(each.mean(each.encoder.rows(each.sizes)) for each in found)
    if tokens > args.seq_length:
        what = f"{words_of(preset, found)}: {tokens:.0f} tokens"
        raise UserError(f"{what} do not fit --seq-length {args.seq_length}")
    squares = float(squares_of(rows.tokens(first)).mean()) if packing else args.seq_length**2
    return tuple(found), squares


def words_of(preset: VLMPreset, inputs: tuple[Inputs, ...] | list[Inputs]) -> str:
    """Return the inputs of a mean row as words, and the patches of the largest."""
    counts = (f"{each.mean(np.ones(len(each.sizes))):.3g} {each.encoder.plural}" for each in inputs)
    images = inputs[preset.names.index(IMAGES)]
    patches = preset.images.count_patches(images.sizes)
    largest = f"{images.mean(patches):,.0f} patches, the largest {images.most(patches, 1):,.0f}"
    return f"{', '.join(counts)} a row ({largest})"


class StateBytes(NamedTuple):
    """Bytes for each parameter: its gradient, and the optimizer's state of the rank's shard, on the
    GPU, on the host and in a checkpoint; and what the loss keeps for each logit."""

    gradient: float
    optimizer: float
    on_host: float
    saved: float
    logit: float


@dataclass(frozen=True, eq=False)
class Task:
    """The run to plan.

    options: the run, whose layouts do not count. world: number of GPUs. machine: their figures.
    inputs: of each encoder, in the preset's order. squares: sum of the squared lengths of a mean
    row's samples. placements: those that may be chosen.
    """

    options: Run
    world: int
    machine: Machine
    inputs: tuple[Inputs, ...]
    squares: float
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

    encoders: places in the preset of the encoders that it has. is_language: whether it has a stage
    of the language model. number: the stage's place in its module's own pipeline.
    """

    encoders: tuple[int, ...]
    is_language: bool
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
    stages, here = [], tuple(range(len(layouts.encoders)))
    if layouts.non_colocated:
        for place, lay in enumerate(layouts.encoders):
            names = [f"encoder {place}, {number}" for number in range(lay.pp)]
            stages += [Stage((place,), False, *each) for each in enumerate(names)]
        here = ()
    stages += [Stage(here, True, n, f"stage {n}") for n in range(layouts.language.pp)]
    return stages if len(stages) > 1 else [stages[0]._replace(name="all ranks")]


def task_of(options: Run, world: int, **figures: object) -> Task:
    """Return the run that options describe, on ``world`` GPUs of the kind that they name.

    Args:
        figures: of the machine, in place of the table's.

    Raises:
        UserError: the model has layers of later tokens, the data cannot be opened, or its inputs do
            not fit.
    """
    args = options.args
    if Symbols.MTP_SEPARATOR in args.hybrid_layer_pattern:
        raise UserError(
            f"--hybrid-layer-pattern {args.hybrid_layer_pattern}: the planner does not know layers "
            f"of multi-token prediction; leave out {Symbols.MTP_SEPARATOR} and what follows"
        )
    machine = find_machine(args.plan_gpu, **{"gpus_per_node": args.plan_gpus_per_node} | figures)
    rows = rows_of(args, options.preset)
    return Task(options, world, machine, *rows, _state_of(args, machine.precision))


def plan_of(options: Run) -> Plan:
    """Return the plan that options ask for, on the GPUs that they name; nothing is reserved."""
    args, precision = options.args, 2 if options.args.bf16 or options.args.fp16 else 4
    recompute = args.recompute_granularity or "none"
    if recompute == "selective":
        recompute = "moe" if "moe" in (args.recompute_modules or ()) else "none"
    task = task_of(options, args.world_size, precision=precision, reserved_bytes=0.0)
    return Plan(task, options.layouts, recompute, options.schedule)


def _state_of(args: Namespace, width: int) -> StateBytes:
    """Return what Adam of Megatron's distributed optimizer keeps for parameters of ``width`` bytes.

    It keeps two moments and, if the parameters have 16 bits, the weight, each in fp32 unless the
    options of the precision-aware optimizer say otherwise. Beside bf16 parameters, that one may
    keep the other half of fp32 weights. Checkpoints have whole weights, and moments in bf16 or
    fp32.
    """
    narrow = args.grad_reduce_in_bf16 or args.main_grads_dtype != torch.float32
    narrow = narrow or (args.fp16 and not args.accumulate_allreduce_grads_in_fp32)
    gradient = 2 if narrow and width == 2 else 4
    moments = args.exp_avg_dtype, args.exp_avg_sq_dtype
    kept = sum(moment.itemsize for moment in moments)
    saved = 4 + sum(2 if moment == torch.bfloat16 else 4 for moment in moments)
    kept += (2 if keeps_halves(args) else args.main_params_dtype.itemsize) * (width == 2)
    on_host = kept * args.optimizer_offload_fraction * args.optimizer_cpu_offload
    # The kernel keeps logits and their gradient; Megatron's loss, logits and two fp32 tensors.
    logit = 2 * width if args.loss_kernel else 8 + width
    return StateBytes(gradient, kept - on_host, on_host, saved, logit)
