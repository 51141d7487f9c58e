# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Answers about a run without starting it: parameters, memory, and the fastest layouts."""

import json
import os
from argparse import Namespace
from collections import Counter
from dataclasses import replace

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import COLOCATED, PLACEMENTS, PLANNED, table
from examples.mimo.nemotron_vlm.model.part_settings import NAMES
from examples.mimo.nemotron_vlm.options.arguments import Options, parse
from examples.mimo.nemotron_vlm.planner.inputs import inputs_of, operations_of_row, words_of
from examples.mimo.nemotron_vlm.planner.layers import RECOMPUTED
from examples.mimo.nemotron_vlm.planner.machine import Machine, find_machine
from examples.mimo.nemotron_vlm.planner.memory import memory_of, peak
from examples.mimo.nemotron_vlm.planner.parameters import (
    EXPERT,
    FIRST,
    LAST,
    PROJECTOR,
    Place,
    by_place,
    stages_on_meta,
)
from examples.mimo.nemotron_vlm.planner.picture import describe as describe_ranks
from examples.mimo.nemotron_vlm.planner.picture import draw
from examples.mimo.nemotron_vlm.planner.plan import plan_of, split_words, state_of
from examples.mimo.nemotron_vlm.planner.report import (
    DECIDED,
    as_data,
    choices_of,
    describe,
    gib,
    memory_table,
)
from examples.mimo.nemotron_vlm.planner.schedule import stages_of_pipeline
from examples.mimo.nemotron_vlm.planner.search import MICRO_SIZES, Found, Task, search
from megatron.training.training import num_floating_point_operations

KINDS = {
    "M": "Mamba-2 layers",
    "G": "gated delta nets",
    "*": "attention layers",
    "E": "MoE layers",
    "-": "MLP layers",
    EXPERT: "MoE layers",
    FIRST: "embedding, norm, output",
    LAST: "embedding, norm, output",
}
"""Rows of the table of parameters, by their place in the language model."""


def dry_run(argv: list[str], ranks: int) -> str:
    """Return parameter counts and predicted memory as text.

    For one rank, parameters are counted by part; for several, by module and pipeline stage, with
    the groups of ranks and the predicted step. ``--picture`` is drawn then.

    Args:
        ranks: number of ranks that the layouts are for; their process groups send nothing.

    Raises:
        UserError: the input is bad, or several processes were started.
    """
    _check_alone()
    os.environ["WORLD_SIZE"] = str(ranks)  # HyperCommGrid checks its size against it
    options = parse(argv, ranks)
    asked, machine = plan_of(options), machine_of(options.args)
    if options.args.picture:
        draw(asked, machine, options.args.picture)
    if ranks == 1:
        return f"{_parameters(options)}\n{_memory(options)}"
    parts = _parameters_of_ranks(options), _memory(options), describe_ranks(asked, machine)
    return "\n".join(parts)


def plan(argv: list[str], own: Namespace) -> str:
    """Return the fastest plans for the GPUs of ``--plan``, as text; write them if asked to.

    Raises:
        UserError: the input is bad, several processes were started, or no plan fits.
    """
    _check_alone()
    task, found = _fastest(argv, own, own.plan)
    if own.plan_json:
        data = as_data(task, found, own.model)
        try:
            own.plan_json.write_text(json.dumps(data, indent=2) + "\n")
        except OSError as error:
            raise UserError(f"--plan-json {own.plan_json}: {error.strerror}") from error
    return describe(task, found, own.model)


def planned(argv: list[str], own: Namespace, ranks: int) -> list[str]:
    """Return the command line with the fastest plan in place of ``--language planned``.

    All ranks find the same one. The nodes have as many GPUs as ranks, if nothing else is said.

    Raises:
        UserError: the input is bad, or no plan fits.
    """
    if not own.dry_run and "--plan-gpus-per-node" not in own.given:
        own.plan_gpus_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    _, found = _fastest(argv, own, ranks)
    return [*argv, *" ".join(choices_of(found.best[0].plan)).split()]


def _fastest(argv: list[str], own: Namespace, ranks: int) -> tuple[Task, Found]:
    if own.language not in ("", PLANNED) or own.encoder:
        raise UserError("the planner finds the layouts: leave out --language and --encoder")
    machine = machine_of(own)
    # The plans decide these; read as one rank, the command line must not ask for more.
    alone = ["--placement", COLOCATED, "--micro-batch-size", "1", "--language="]
    options = parse([*argv, *alone], 1)
    given = {word.split("=")[0]: None for word in options.words if word.startswith("--recompute-")}
    if given and own.language == PLANNED:
        raise UserError(
            f"--language planned chooses what is recomputed: leave out {', '.join(given)}"
        )
    args, preset = options.args, options.preset
    is_chosen = "--placement" in own.given
    inputs = inputs_of(args, preset)
    args.modality_flops_per_sample = operations_of_row(preset, inputs)
    task = Task(
        preset=preset,
        world=ranks,
        machine=machine,
        seq_length=args.seq_length,
        global_batch=args.global_batch_size,
        inputs=inputs,
        operations=num_floating_point_operations(args, 1),
        placements=(own.placement,) if is_chosen else PLACEMENTS,
        micro_sizes=(1,) if args.pack else MICRO_SIZES,
        state=state_of(args, machine.precision == 2),
        frozen=options.parts.frozen,
        given=tuple(split_words(options.words, DECIDED)[1]),
    )
    return task, search(task)


def machine_of(own: Namespace) -> Machine:
    """Return the machine that ``--plan-gpu`` and ``--plan-gpus-per-node`` describe."""
    if own.plan_gpus_per_node < 1:
        raise UserError("--plan-gpus-per-node must be 1 or more")
    return replace(find_machine(own.plan_gpu), gpus_per_node=own.plan_gpus_per_node)


def _check_alone() -> None:
    started = int(os.environ["WORLD_SIZE"])
    if started > 1:
        raise UserError(f"--dry-run and --plan tell of all ranks: start 1 rank, not {started}")


def _parameters(options: Options) -> str:
    """Return a table of parameters by part, in total and active per token (top-k experts)."""
    sizes, total, active = options.preset.language, Counter(), Counter()
    for place, number in _counted(options, 0).items():
        share = sizes.moe_router_topk / sizes.num_experts if place == EXPERT else 1.0
        part = _encoder_part(options, place)
        entries = [part] if part else [f"language: {KINDS[place]}", "language model"]
        for entry in (*entries, "all"):
            total[entry] += number
            active[entry] += number * share
    ordered = sorted(total, key=lambda part: (part == "all", part == "language model", part))
    rows = [[p, f"{total[p] / 1e9:.4f} B", f"{active[p] / 1e9:.4f} B"] for p in ordered]
    return table([["part", "total", "active"], *rows])


def _parameters_of_ranks(options: Options) -> str:
    """Return a table of the parameters that a rank of each pipeline stage holds.

    Colocated modules are listed by the language model's stages, as the encoder has a single one.
    """
    names = options.preset.names
    parts = [_encoder_part(options, (name, part)) for name in names for part in NAMES]
    parts.append("language")
    rows, first = [["ranks", *parts, "sum"]], 0
    for stage in stages_of_pipeline(options.layouts):
        held = Counter()
        for place, number in _counted(options, first).items():
            held[_encoder_part(options, place) or "language"] += number
        ranks = f"{first}-{first + stage.ranks - 1}" if stage.ranks > 1 else str(first)
        counts = *(held[part] for part in parts), held.total()
        rows.append([ranks, *(f"{count / 1e9:.4f} B" for count in counts)])
        first += stage.ranks
    return table(rows)


def _encoder_part(options: Options, place: Place) -> str | None:
    """Return "encoder" or "projector" for such a place, named if the model has several."""
    if isinstance(place, str):
        return None
    name, part = place
    part = PROJECTOR if part == PROJECTOR else "encoder"
    return f"{name} {part}" if len(options.preset.encoders) > 1 else part


def _counted(options: Options, rank: int) -> dict[Place, int]:
    """Count the parameters that a rank holds, by their place in the model."""
    with stages_on_meta(options, rank) as stages:
        found = by_place(stages)
    return {place: sum(parameter.size for parameter in found[place]) for place in found}


def _memory(options: Options) -> str:
    """Return the predicted memory: by stage, and the most with each other recompute setting."""
    args, asked = options.args, plan_of(options)
    machine = replace(
        find_machine("h200"),
        precision=2 if args.bf16 or args.fp16 else 4,
        fused=args.device == "cuda" and args.transformer_impl != "local",
        reserved_bytes=0.0,
    )
    others = (
        f"{again} {gib(peak(memory_of(replace(asked, recompute=again), machine)))}"
        for again in RECOMPUTED
    )
    precision = "16 bits" if machine.precision == 2 else "fp32"
    return (
        f"predicted GiB of a rank in {precision} with {words_of(asked.preset, asked.inputs)} a "
        f"sample, recompute {asked.recompute}:\n{memory_table(asked, machine)}\n"
        f"most of a rank with other recompute of the language model: {', '.join(others)}"
    )
