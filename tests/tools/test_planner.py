# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The planner against measured runs, Megatron's counts, models, groups and orders."""

import json
import math
import re
import shlex
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import NON_COLOCATED, Batch, Layout, parse_layout
from examples.mimo.nemotron_vlm.options import derived
from examples.mimo.nemotron_vlm.options.command_line import read
from examples.mimo.nemotron_vlm.options.layout_rules import derive
from examples.mimo.nemotron_vlm.options.on_meta import stages_on_meta
from examples.mimo.nemotron_vlm.options.run import Run
from examples.mimo.nemotron_vlm.planner import memory, plan, report
from examples.mimo.nemotron_vlm.planner import parameters as params
from examples.mimo.nemotron_vlm.planner.layers import language_layer
from examples.mimo.nemotron_vlm.planner.machine import Group, find_machine, groups_of
from examples.mimo.nemotron_vlm.planner.memory import peak
from examples.mimo.nemotron_vlm.planner.plan import Plan, Task, plan_of, stages_of_pipeline
from examples.mimo.nemotron_vlm.planner.search import candidates, search
from examples.mimo.nemotron_vlm.planner.step_time import seconds, step_time
from megatron.core import cpu_runtime
from megatron.core.models.mimo.setup.module_groups import make_grid
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from megatron.core.process_groups_from_grid import DENSE_FIELDS, EXPERT_FIELDS, EXPERT_VIEW
from megatron.training.training import num_floating_point_operations

H200 = find_machine("h200")
LARGE = "nano-vl-30b-a3b"
MEASURED = Path(__file__).parents[2] / "docs/benchmarks"
APART = "--placement non-colocated --encoder tp=2,pp=2 --language tp=2,pp=2,ep=2,etp=1"
UNKNOWN = "cuda-graph|--fp8|precision-aware|energon:|--img-h|tile-|grouped"
"""Options of measured runs that the planner or this machine does not know."""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    cpu_runtime.install()


def task_of(*words: str, world: int, **figures) -> Task:
    """Return the tiny model's run on H200s, in which an image has two tiles."""
    given = "--data", "digits:2", "--global-batch-size", "64", *words
    run = Run.of([*given, "--placement", "colocated", "--micro-batch-size", "1"], 1)
    return plan.task_of(run, world, **figures)


def test_memory_is_within_5_percent_of_measured_runs_and_time_orders_them(monkeypatch):
    """The runs had Megatron's loss, and encoded one microbatch at once unless they say more."""
    monkeypatch.setattr(derived, "has_loss_kernel", lambda: False)
    times = {}
    for file in sorted(MEASURED.glob("*.json")):
        for run in json.loads(file.read_text())["runs"]:
            words = run["arguments"]
            if re.search(UNKNOWN, words) or words in times or run["peak_memory_gib"] is None:
                continue
            if "--encoder-macro-batch" not in words:
                words += " --encoder-macro-batch 1"
            asked = plan_of(Run.of(shlex.split(words), run["ranks"]))
            measured = run["peak_memory_gib"] * 2**30
            assert peak(asked) == pytest.approx(measured, rel=0.05), (file.name, run["name"])
            times[run["arguments"]] = seconds(asked), run["step_s"]
    assert len(times) > 12
    ranks = [np.argsort(np.argsort(column)) for column in zip(*times.values(), strict=True)]
    assert np.corrcoef(ranks)[0, 1] > 0.85


def test_frozen_weights_have_no_gradient_and_graphs_no_launches():
    """Without launches, compute is in proportion to passes: forward, inputs' and weights'."""
    words = f"--device cuda --bf16 --transformer-impl transformer_engine --model {LARGE}".split()
    none = {"overhead": dict.fromkeys(H200.overhead, 0.0), "microbatch_overhead": 0.0}
    none["memory_bandwidth"] = math.inf

    def compute(*more: str, **figures) -> float:
        task = task_of(*words, *more, world=1, **figures)
        return step_time(Plan(task, task.options.layouts))["compute"]

    whole, part = compute(**none), compute("--freeze", "encoder", **none)
    encoder = 3 / 2 * (whole - part)
    language = whole - encoder
    assert compute("--freeze", "language", **none) == pytest.approx(encoder + language * 2 / 3)
    for frozen in (("--freeze", "encoder,language"), ("--lora-dim", "8")):
        assert compute(*frozen, **none) == pytest.approx(encoder / 3 + language * 2 / 3)
    graphs = "--cuda-graph-impl", "local"
    assert compute(*graphs, **none) == whole < compute(*graphs) < compute()


def test_attention_takes_the_squares_of_samples_in_packed_rows():
    task = task_of("--model", LARGE, "--seq-length", "4096", world=1)
    p, layouts = task.preset.language, task.options.layouts
    task = replace(task, machine=replace(H200, overhead=dict.fromkeys(H200.overhead, 0.0)))
    times = [
        step_time(Plan(replace(task, squares=share * 4096**2), layouts))["compute"]
        for share in (1.0, 0.25)
    ]
    (work,) = (language_layer(kind, p, layouts.language, layouts.batch).work for kind in "*")
    saved = 0.75 * H200.seconds({"attention": work["attention"]})
    number = 3 * p.hybrid_layer_pattern.count("*") * layouts.num_microbatches
    assert times[0] - times[1] == pytest.approx(number * saved)


@pytest.mark.parametrize(("vocabulary", "larger"), [(32768, "recomputed layer"), (131072, "loss")])
def test_a_layer_runs_again_when_the_loss_is_freed(vocabulary, larger, monkeypatch):
    monkeypatch.setattr(derived, "has_loss_kernel", lambda: True)
    line = f"--device cuda --bf16 --plan 2 --model {LARGE} --vocab-size {vocabulary}"
    again = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    (parts,) = memory.memory_of(plan_of(Run.of(f"{line} {again}".split(), 2))).values()
    assert {"loss", "recomputed layer"} & parts.keys() == {larger}


@pytest.mark.parametrize("kind", "*EG-M")
def test_operations_of_a_layer_are_megatrons(kind):
    """Mamba-2 has heads as wide as Megatron takes them to be, twice the hidden size; the planner
    counts the router as well, and Megatron the logits."""
    sizes = "--hidden-size 64 --mamba-head-dim 4 --mamba-num-heads 32 --ffn-hidden-size 256"
    line = f"--model tiny-gdn --hybrid-layer-pattern {kind} --seq-length 64 {sizes}"
    run = Run.of(line.split(), 1)
    p = run.preset.language
    uncounted = 3 * 2 * 3 * 64 * p.hidden_size
    expected = num_floating_point_operations.__wrapped__(run.args, 3)
    expected += uncounted * (p.num_experts * (kind == "E") - p.vocab_size)
    for lay in (Layout(dp=1, etp=1), Layout(tp=2, cp=4, dp=1, ep=4, etp=1)):
        work = language_layer(kind, p, lay, Batch(3, 3, 64)).work
        assert 3 * lay.size * sum(work.values()) == pytest.approx(expected)


@pytest.mark.parametrize(
    "line, world, rank, stage",
    [
        (f"--model {LARGE} --encoder tp=8 --language tp=2,pp=4,ep=8,etp=1", 64, 63, 3),
        (f"--model {LARGE}-gdn --encoder tp=4 --language tp=2,cp=4,pp=4,ep=16", 4096, 1500, 1),
        (f"--model tiny-gdn {APART}", 8, 5, 2),
        ("--model tiny --encoder tp=2 --language pp=2,vpp=2,ep=4", 8, 0, 0),
    ],
)
def test_parameters_are_those_of_the_rank_s_own_model(line, world, rank, stage, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    words = f"--global-batch-size {2 * world} --micro-batch-size 1 --freeze encoder,language"
    task, wanted = plan_of(Run.of([*line.split(), *words.split()], world)).task, Counter()
    with stages_on_meta(task.options, rank) as stages:
        # Layers that name the current device take no memory either.
        assert {p.device.type for stage in stages for p in stage.parameters()} == {"meta"}
        for place, number in params.by_place(stages).items():
            wanted[params.EXPERT if place.kind == params.EXPERT else place.part[1]] += number
    held = wanted["encoder"] + wanted["projector"], wanted["language"], wanted[params.EXPERT]
    place = task.options.layouts, stages_of_pipeline(task.options.layouts)[stage]
    assert params.held(task, *place) == [*held]
    assert params.held(task, *place, trained=True) == [wanted["projector"], 0, 0]


@pytest.mark.parametrize("pp, vpp, number", [(4, 1, 8), (4, 1, 2), (4, 2, 8), (4, 3, 4), (1, 1, 8)])
def test_activations_are_of_the_microbatches_in_flight_in_megatrons_order(pp, vpp, number):
    kept, lay = [1.5, 1.0, 0.7][:vpp], Layout(dp=1, etp=1, pp=pp, vpp=vpp)
    chunks = [chunk for _, chunk in get_schedule_table(number, vpp, pp)]
    forwards, backwards = [kept[c] for c in chunks], [-kept[vpp - 1 - c] for c in chunks]
    virtual = vpp if vpp > 1 else None
    for stage in range(pp):
        group = Namespace(size=lambda: pp, rank=lambda stage=stage: stage)
        rank = Namespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)
        warmup = get_pp_rank_microbatches(number, vpp, pp, p2p_communicator=rank)[2]
        steady = [step for pair in zip(forwards[warmup:], backwards, strict=False) for step in pair]
        most = np.cumsum(forwards[:warmup] + steady).max()
        assert memory.most_in_flight(stage, lay, number, kept) == pytest.approx(most)


@pytest.mark.parametrize("per_node", [8, 3])
@pytest.mark.parametrize(
    "lay", [Layout(2, 4, 4, 128, 8, 1), Layout(4, 2, 2, 32, 4, 4), Layout(dp=16, ep=8, etp=1)]
)
def test_groups_are_those_of_the_grids_that_training_makes(lay, per_node, monkeypatch):
    """tests/unit_tests/test_process_groups_config.py compares these with brute force."""
    monkeypatch.setenv("WORLD_SIZE", "4096")
    grid = make_grid(lay, "none")
    for axis, group in groups_of(lay, per_node).items():
        view = EXPERT_VIEW if axis in EXPERT_FIELDS else None
        first = grid.get_rank_enum((DENSE_FIELDS | EXPERT_FIELDS)[axis], view=view)[0]
        assert group == Group(len(first), len(first) / len({r // per_node for r in first})), axis


@pytest.mark.parametrize("language, waits", [("pp=4", 3), ("pp=2,vpp=2", 0.5), ("dp=4", 0)])
def test_equal_stages_wait_as_in_1f1b(language, waits):
    """In microbatches of a stage, (pp - 1) / vpp; two layers are a (virtual) stage each."""
    overhead = dict.fromkeys(H200.overhead, 0.0) | dict.fromkeys("ME*", 1e3)
    asked = [Layout()], parse_layout(language, "language"), Batch(32, 1, 32)
    planned = Plan(task_of(world=4, overhead=overhead), derive(*asked, 4))
    stage = 8e3 / planned.layouts.language.pp
    assert step_time(planned)["bubble"] == pytest.approx(waits * stage, rel=1e-3)


def test_the_search_keeps_to_the_memory_and_recomputes_where_that_helps():
    words = "--model", LARGE, "--data", "digits:12", "--seq-length", "4096"
    fastest = []
    for limit in (141e9, 120e9):
        plans, _ = search(task_of(*words, world=8, memory_bytes=limit))
        assert all(peak(plan) <= limit for plan in plans)
        assert [seconds(plan) for plan in plans] == sorted(map(seconds, plans))
        fastest.append(seconds(plans[0]))
    assert fastest[1] > fastest[0]
    assert {plan.recompute for plan in plans} & {"moe", "full"}


PRECISE = "--use-precision-aware-optimizer"
OFFLOAD = f"{PRECISE} --optimizer-cpu-offload --optimizer-offload-fraction 0.75"
NARROW = f"{PRECISE} --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype=fp8"


@pytest.mark.parametrize(
    ("options", "gradient", "gpu", "host", "saved", "logit"),
    [
        ("--grad-reduce-in-bf16", 2, 12, 0, 12, 4),
        (f"{PRECISE} --main-params-dtype fp16", 4, 2 + 8, 0, 12, 4),
        (NARROW, 2, 2 + 3, 0, 4 + 2 + 4, 10),
        (OFFLOAD, 4, 2.5, 7.5, 12, 10),
    ],
)
def test_state_has_the_types_that_the_optimizer_keeps(
    options, gradient, gpu, host, saved, logit, monkeypatch
):
    """Bytes of a gradient and of Adam's state, by the documentation of Megatron and FusedAdam; a
    checkpoint has whole weights, moments in bf16 or fp32, and the bf16 weights. State on the host
    is copied in a step. Logits and their gradients are in bf16; Megatron's loss has an fp32 softmax
    and gradient."""
    monkeypatch.setattr(derived, "has_loss_kernel", lambda: logit == 4)
    asked = plan_of(Run.of(shlex.split(f"--device cuda --bf16 --plan 2 {options}"), 2))
    (parts,), (of_host,) = memory.memory_of(asked).values(), memory.host_memory_of(asked)
    numbers, shard = parts["parameters"] / 2, parts["optimizer"] / gpu
    assert parts["gradients"] == gradient * numbers
    assert numbers / 2 <= shard <= numbers
    assert of_host == pytest.approx({"state": shard * host, "save": shard * (saved + 2)})
    machine = replace(asked.task.machine, host_bandwidth=math.inf)
    times = [step_time(replace(asked, task=replace(asked.task, machine=machine))), step_time(asked)]
    copies = times[1]["optimizer"] - times[0]["optimizer"]
    assert copies == pytest.approx(of_host["state"] / 64e9)
    tokens = asked.layouts.batch.micro_size * asked.layouts.batch.seq_length
    assert parts["loss"] == logit * tokens * asked.task.preset.language.vocab_size


@pytest.mark.parametrize("more", ["", f"--pack --placement {NON_COLOCATED}"])
def test_the_fastest_plan_is_run_by_ranks_whose_layouts_are_planned(more, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    words = f"--global-batch-size 12 --seq-length 64 {more}".split()
    for ranks in (6, 4):
        planned = report.planned(read(["--language", "planned", *words]), ranks)
        found = Run.of(planned, ranks).layouts
        assert found.batch.micro_size == 1 or "--pack" not in more
        assert found.non_colocated or "--placement" not in more
        text = report.answer(read(["--plan", str(ranks), "--plan-gpus-per-node", "2", *words]))
        assert text.count("--language") == 1 and "--language=" not in text
        assert found in list(candidates(task_of(*words, world=ranks, gpus_per_node=2)))


@pytest.mark.parametrize("question", ["--dry-run 1", "--plan 2"])
def test_layers_of_later_tokens_are_refused(question):
    with pytest.raises(UserError, match="^--hybrid-layer-pattern .* multi-token prediction"):
        report.answer(read([*question.split(), "--hybrid-layer-pattern", "MEM*/E*"]))


@pytest.mark.parametrize("size", ["--tensor-model-parallel-size=1", "--encoder-tp=1"])
def test_sizes_of_a_layout_are_left_to_the_planner(size):
    for asked in (["--plan", "2"], ["--language", "planned", "--dry-run", "2"]):
        line = read([*asked, size])
        with pytest.raises(UserError, match=f"finds the layouts: leave out {size[:-2]}$"):
            report.answer(line) if line.args.plan else report.planned(line, 2)


@pytest.mark.parametrize(("per_node", "nodes"), [(12, 1), (8, 2), (5, 3)])
def test_the_launched_nodes_have_as_many_ranks_as_the_plan(per_node, nodes):
    task = task_of("--global-batch-size", "12", world=12, gpus_per_node=per_node)
    launch = report.command(Plan(task, next(candidates(task))))[0].split()
    assert launch[2] == str(12 // nodes)
    assert (launch[4] if nodes > 1 else "1") == str(nodes)


GRAPHS = "--device cuda --bf16 --transformer-impl transformer_engine --cuda-graph-impl local"


@pytest.mark.parametrize(
    "more",
    [
        "--pack --sample-multiple 2",
        "--eval-iters 1 --eval-global-batch-size 2",
        "--step-batch-size-schedule '0:4 1K:6'",
        f"{GRAPHS} --data mock",
    ],
)
def test_the_program_takes_the_plans(more, monkeypatch):
    """A plan's command has the user's other options, and must keep their rules."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    alone = "--seq-length 64 --placement colocated --micro-batch-size 1"
    task = plan.task_of(Run.of(shlex.split(f"{more} {alone}"), 1), 4)
    found, _ = search(task, keep=10**6)
    for one in found[:: len(found) // 20 or 1]:
        words = shlex.split(" ".join(report.command(one)))
        Run.of(words[words.index("examples/mimo/pretrain_nemotron_vlm.py") + 1 :], 4)
