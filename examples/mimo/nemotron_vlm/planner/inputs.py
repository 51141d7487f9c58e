# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The planner reads the command line here, and the inputs of the rows of tokens.

The inputs are those of the first rows that training would read, by the survey's sizes. Where the
shards are not there, rows are full of images, as mock samples are.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.data import DIGITS, SOURCES, make_source, path_of
from examples.mimo.nemotron_vlm.data.rows import SIZE, Packing, Rows
from examples.mimo.nemotron_vlm.model.encoders import Encoder
from examples.mimo.nemotron_vlm.model.names import IMAGES
from examples.mimo.nemotron_vlm.model.part_settings import ModelPart
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.planner.machine import Machine, find_machine
from examples.mimo.nemotron_vlm.planner.plan import Plan, StateBytes, Task
from megatron.core.models.mimo.joint_optimizer.remainders import keeps_halves
from megatron.training.training import num_floating_point_operations

if TYPE_CHECKING:  # Megatron's parser is slow to import
    from examples.mimo.nemotron_vlm.options.run import Run

DRAWN = 1000
"""Rows that ``--plan-tiles`` stands for."""


class Inputs:
    """An encoder's inputs in some rows of tokens, which stand for all rows.

    Args:
        rows: sizes of the inputs of each row, int64 [inputs].
    """

    def __init__(self, encoder: Encoder, rows: list[np.ndarray]) -> None:
        self.encoder, self.sizes, self._rows = encoder, np.concatenate(rows), len(rows)
        self._row = np.repeat(np.arange(len(rows)), [len(row) for row in rows])

    @cached_property
    def embeddings(self) -> np.ndarray:
        """Rows of the language model that each input becomes, int64 [inputs]."""
        return self.encoder.rows(self.sizes)

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
        self, own: Layout, rows: float, frozen: frozenset[ModelPart], *ends: bool
    ) -> float:
        """Return the most elements that a rank of one stage keeps of the inputs of ``rows`` rows.

        A frozen encoder keeps nothing, but its projector may still be trained.

        Args:
            ends: whether the stage is its pipeline's first, and its last; both by default.
        """
        encoder, (first, last) = self.encoder, ends or (True, True)
        if (encoder.name, "encoder") in frozen:
            if (encoder.name, "projector") in frozen:
                return 0.0
            encoder, first = replace(encoder, layers=0), False
        return self.most(encoder.kept(self.sizes, own, first, last), rows)


def inputs_of(args: Namespace, preset: VLMPreset) -> tuple[Inputs, ...]:
    """Return the inputs of each encoder.

    Raises:
        UserError: the data cannot be opened, or the inputs do not fit the sequence.
    """
    path = path_of(args.data)
    is_there = Path(path).exists() if path else args.data.partition(":")[0] not in SOURCES
    opened = args if is_there else Namespace(**vars(args) | {"data": "mock"})
    packing = Packing(args.pack_window, args.sample_multiple) if args.pack and is_there else None
    tiles = args.plan_tiles or args.data.partition(DIGITS)[2]
    rows = Rows(make_source(opened, preset), "train", args.seq_length, packing, args.seed)
    first, width = rows.first(), preset.language.hidden_size
    found = [
        tiles_of(tiles, each)
        if tiles and each.name == IMAGES
        else Inputs(each, [row[:, SIZE] for row in rows.inputs(first, each, width)])
        for each in preset.encoders
    ]
    tokens = sum(each.mean(each.embeddings) for each in found)
    if tokens > args.seq_length:
        what = f"{words_of(preset, found)}: {tokens:.0f} tokens"
        raise UserError(f"{what} do not fit --seq-length {args.seq_length}")
    return tuple(found)


def tiles_of(text: str, encoder: Encoder) -> Inputs:
    """Return the rows of ``--plan-tiles`` N[:CHANCE],…; chances need not add up to 1.

    Raises:
        UserError: the text is something else.
    """
    try:
        pairs = [part.partition(":") for part in text.split(",")]
        chances = {int(count): float(chance or 1) for count, _, chance in pairs}
        if min(chances) < 0 or not min(chances.values()) > 0:
            raise ValueError
    except ValueError:
        what = "is not N or N:CHANCE,… with N of 0 or more and chances above 0"
        raise UserError(f"--plan-tiles {text} {what}") from None
    bounds = np.cumsum([0, *chances.values()]) / sum(chances.values())
    counts = np.repeat(list(chances), np.diff(np.rint(bounds * DRAWN).astype(int)))
    counts = np.random.default_rng(0).permutation(counts)
    return Inputs(encoder, [np.full(count, encoder.usual) for count in counts])


def words_of(preset: VLMPreset, inputs: tuple[Inputs, ...] | list[Inputs]) -> str:
    """Return the inputs of a mean row as words, and the patches of the largest."""
    counts = (f"{each.mean(np.ones(len(each.sizes))):.3g} {each.encoder.plural}" for each in inputs)
    images = inputs[preset.names.index(IMAGES)]
    patches = preset.images.count_patches(images.sizes)
    largest = f"{images.mean(patches):,.0f} patches, the largest {images.most(patches, 1):,.0f}"
    return f"{', '.join(counts)} a row ({largest})"


def state_of(args: Namespace, in_16_bits: bool) -> StateBytes:
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


def machine_of(args: Namespace) -> Machine:
    """Return the machine that ``--plan-gpu`` and ``--plan-gpus-per-node`` describe."""
    machine, has_graphs = find_machine(args.plan_gpu), args.cuda_graph_impl == "local"
    return replace(machine, gpus_per_node=args.plan_gpus_per_node, has_graphs=has_graphs)


def task_of(options: Run, machine: Machine, world: int, **chosen: object) -> Task:
    """Return the run that options describe, on ``world`` GPUs of a machine."""
    args, preset = options.args, options.preset
    inputs, width = inputs_of(args, preset), preset.language.hidden_size
    encoding = sum(each.mean(each.encoder.operations(each.sizes, width)) for each in inputs)
    of_language = num_floating_point_operations.__wrapped__(args, 1)  # Megatron's own count
    return Task(
        preset,
        world,
        machine,
        args.seq_length,
        args.global_batch_size,
        inputs,
        operations=of_language + encoding,
        micro_sizes=(1,) if args.pack else Task.micro_sizes,
        state=state_of(args, machine.precision == 2),
        frozen=options.parts.frozen,
        adapters=options.adapters,
        words=options.line.words,
        **chosen,
    )


def plan_of(options: Run) -> Plan:
    """Return the plan that options ask for, on the GPUs that they name; nothing is reserved."""
    args, precision = options.args, 2 if options.args.bf16 or options.args.fp16 else 4
    machine = replace(machine_of(args), precision=precision, reserved_bytes=0.0)
    recompute = args.recompute_granularity or "none"
    if recompute == "selective":
        recompute = "moe" if "moe" in args.recompute_modules else "none"
    task = task_of(options, machine, args.world_size)
    return Plan(task, options.layouts, recompute, options.schedule)
