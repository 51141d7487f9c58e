# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Answers about a run without starting it: parameters, memory, and the fastest layouts."""

from __future__ import annotations

import os
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import table
from examples.mimo.nemotron_vlm.loop.replaced import replaced
from examples.mimo.nemotron_vlm.model.model import build_vlm, placed
from examples.mimo.nemotron_vlm.model.part_settings import PARTS, part_of
from examples.mimo.nemotron_vlm.options.arguments import Options, parse
from examples.mimo.nemotron_vlm.planner.activations import KEPT_FOR_LAYER
from examples.mimo.nemotron_vlm.planner.machine import find_machine
from examples.mimo.nemotron_vlm.planner.memory import memory_of, peak
from examples.mimo.nemotron_vlm.planner.plan import most_that_fit, plan_of
from examples.mimo.nemotron_vlm.planner.report import describe, gib, memory_table
from examples.mimo.nemotron_vlm.planner.search import Task, plans_of
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.setup.module_groups import make_modules, prepare_process
from megatron.core.models.mimo.setup.teardown import destroy
from megatron.training.global_vars import set_global_variables, unset_global_variables

KINDS = {
    "M": "Mamba-2 layers",
    "G": "gated delta nets",
    "*": "attention layers",
    "E": "MoE layers",
    "-": "MLP layers",
}


def dry_run(argv: list[str], ranks: int) -> str:
    """Return parameter counts and predicted memory as text.

    For one rank, parameters are counted by part; for several, by module and pipeline stage.

    Args:
        argv: the command line.
        ranks: number of ranks that the layouts are for; their process groups send nothing.

    Raises:
        UserError: the input is bad, or several processes were started.
    """
    _check_alone()
    os.environ["WORLD_SIZE"] = str(ranks)  # HyperCommGrid checks its size against it
    options = parse(argv, ranks)
    counted = _parameters(options) if ranks == 1 else _parameters_of_ranks(options)
    return f"{counted}\n{_memory(options)}"


def plan(argv: list[str], own: Namespace) -> str:
    """Return the fastest plans for the GPUs of ``--plan``, as text.

    Raises:
        UserError: the input is bad, several processes were started, or no plan fits.
    """
    _check_alone()
    if own.language or own.encoder:
        raise UserError("--plan finds the layouts: leave out --language and --encoder")
    options = parse(argv, 1)
    args, preset = options.args, options.preset
    tiles = most_that_fit(preset, args.seq_length)
    task = Task(preset, own.plan, 8, args.seq_length, args.global_batch_size, tiles)
    machine = find_machine(own.plan_gpu)
    return describe(task, machine, plans_of(task, machine), own.model)


def _check_alone() -> None:
    started = int(os.environ["WORLD_SIZE"])
    if started > 1:
        raise UserError(f"--dry-run and --plan tell of all ranks: start 1 rank, not {started}")


def _parameters(options: Options) -> str:
    """Return a table of parameters by part, in total and active per token (top-k experts)."""
    sizes, total, active = options.preset.language, Counter(), Counter()
    with stages_on_meta(options, 0) as (model,):
        parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    for name, number in parameters.items():
        is_routed = ".local_experts." in name or ".experts.weight" in name
        share = sizes.moe_router_topk / sizes.num_experts if is_routed else 1.0
        entries = [part_of(name), "all"]
        if entries[0] == "language":
            kind = _kind(name, sizes.hybrid_layer_pattern)
            entries = [f"language: {kind}", "language model", "all"]
        for entry in entries:
            total[entry] += number
            active[entry] += number * share
    ordered = sorted(total, key=lambda part: (part == "all", part == "language model", part))
    rows = [[p, f"{total[p] / 1e9:.4f} B", f"{active[p] / 1e9:.4f} B"] for p in ordered]
    return table([["part", "total", "active"], *rows])


def _kind(name: str, pattern: str) -> str:
    if ".decoder.layers." not in name:
        return "embedding, norm, output"
    layer = int(name.split(".decoder.layers.")[1].split(".")[0])
    return KINDS[pattern.replace("|", "")[layer]]


def count_by_module(stages: list[MimoModel]) -> dict[str, int]:
    """Count the parameters of all virtual stages of a rank, by module."""
    counts = dict.fromkeys(PARTS, 0)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            counts[part_of(name)] += parameter.numel()
    return counts


def _parameters_of_ranks(options: Options) -> str:
    """Return a table of the parameters that a rank of each pipeline stage holds.

    Colocated modules are listed by the language model's stages, as the encoder has a single one.
    """
    rows, layouts = [["ranks", *PARTS, "sum"]], options.layouts
    modules = [(layouts.language_offset, layouts.language)]
    if layouts.non_colocated:
        modules.insert(0, (0, layouts.encoder))
    for offset, layout in modules:
        size = layout.size // layout.pp
        for first in range(offset, offset + layout.size, size):
            with stages_on_meta(options, first) as stages:
                held = count_by_module(stages).values()
            ranks = f"{first}-{first + size - 1}" if size > 1 else str(first)
            rows.append([ranks, *(f"{count / 1e9:.4f} B" for count in (*held, sum(held)))])
    return table(rows)


def _memory(options: Options) -> str:
    """Return the memory that the planner predicts, with these options and other recompute."""
    args, asked = options.args, plan_of(options)
    machine = replace(
        find_machine("h200"),
        precision=2 if args.bf16 or args.fp16 else 4,
        fused=args.device == "cuda" and args.transformer_impl != "local",
        reserved_bytes=0.0,
    )
    others = (
        f"{again} {gib(peak(memory_of(replace(asked, recompute=again), machine)))}"
        for again in KEPT_FOR_LAYER
    )
    precision = "16 bits" if machine.precision == 2 else "fp32"
    return (
        f"predicted GiB of a rank in {precision} with {asked.images.mean:g} tiles a sample, "
        f"recompute {asked.recompute}:\n{memory_table(asked, machine)}\n"
        f"most of a rank with other recompute of the language model: {', '.join(others)}"
    )


@contextmanager
def stages_on_meta(options: Options, rank: int) -> Iterator[list[MimoModel]]:
    """Build a rank's virtual stages on the meta device, with process groups that send nothing."""
    args, configs = options.args, options.configs
    with ExitStack() as undone:
        # Nothing runs, so no graph is needed; Megatron's own layers have the same parameters.
        counted = {"cuda_graph_impl": "none", "transformer_impl": "local"}
        for part in (args, configs.encoder, configs.projector, configs.language):
            undone.enter_context(replaced(part, **counted))
        set_global_variables(args, build_tokenizer=False)
        undone.callback(unset_global_variables)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
        undone.callback(dist.destroy_process_group)
        modules = make_modules(placed(options.layouts), "fake")
        prepare_process(modules, args)
        # Some of Megatron's layers ask for the current CUDA device instead of the default one.
        with torch.device("meta"), replaced(torch.cuda, current_device=lambda: "meta"):
            stages = build_vlm(args, options.preset, configs, modules)
        undone.callback(destroy, stages, modules)
        yield stages
