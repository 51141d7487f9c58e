# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""``--plan``: what it searches, takes, refuses, prints and writes."""

import json
import random
import shlex
from dataclasses import replace

import pytest
import torch

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import NON_COLOCATED, PLACEMENTS, Batch, Layout, Layouts
from examples.mimo.nemotron_vlm.loop.dry_run import dry_run, planned
from examples.mimo.nemotron_vlm.loop.dry_run import plan as plan_text
from examples.mimo.nemotron_vlm.loop.encoder_schedule import schedule_of
from examples.mimo.nemotron_vlm.model.presets import find_preset
from examples.mimo.nemotron_vlm.options import arguments
from examples.mimo.nemotron_vlm.options.arguments import parse
from examples.mimo.nemotron_vlm.options.layout_rules import resolve
from examples.mimo.nemotron_vlm.options.own_options import own_options
from examples.mimo.nemotron_vlm.planner.inputs import Inputs
from examples.mimo.nemotron_vlm.planner.machine import find_machine
from examples.mimo.nemotron_vlm.planner.memory import peak
from examples.mimo.nemotron_vlm.planner.picture import leaving, modules_of
from examples.mimo.nemotron_vlm.planner.report import options_of
from examples.mimo.nemotron_vlm.planner.search import Task, candidates, search
from megatron.core import cpu_runtime

H200 = find_machine("h200")
LARGE = "nano-vl-30b-a3b"
REAL = f"--model {LARGE} --seq-length 8192 --plan-tiles 12"
WORLD, RANDOM_LAYOUTS = 16, 1000


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    cpu_runtime.install()


def task_of(model="tiny", world=WORLD, batch=64, tiles=2.0, machine=H200, **how) -> Task:
    preset = find_preset(model)
    return Task(preset, world, machine, preset.seq_length, batch, (Inputs(tiles),), 0.0, **how)


def random_layouts(draw: random.Random) -> tuple:
    """Draw layouts of 16 ranks, many of which break a rule; non-colocated encoders have 4 or 8."""
    apart = draw.random() < 0.3
    ranks = draw.choice((4, 8)) if apart else WORLD
    tp, pp = draw.choice((1, 2, 4, 8)), draw.choice((1, 2)) if apart else 1
    encoder = Layout(tp=tp, pp=pp, dp=max(1, ranks // (tp * pp)), etp=tp)
    ranks = WORLD - ranks if apart else WORLD
    tp, cp, pp = draw.choice((1, 2, 4)), draw.choice((1, 2, 4)), draw.choice((1, 2, 4, 8))
    vpp = draw.choice((1, 1, 2)) if pp > 1 and not apart else 1
    dp = max(1, ranks // (tp * cp * pp))
    language = Layout(tp, cp, pp, dp, draw.choice((1, 2, 4, 8)), draw.choice((1, tp)), vpp)
    return encoder, language, Batch(64, draw.choice((1, 2, 4, 8)), 32), PLACEMENTS[apart]


class TestSearch:
    def test_takes_what_the_program_takes_of_a_thousand_random_layouts(self):
        preset, draw = find_preset("tiny"), random.Random(1)
        searched = {
            (lay.encoder, lay.language, lay.batch, lay.placement) for lay in candidates(task_of())
        }
        taken = 0
        for _ in range(RANDOM_LAYOUTS):
            encoder, language, batch, placement = asked = random_layouts(draw)
            try:
                resolve([encoder], language, batch, WORLD, preset, placement)
            except UserError:
                assert asked not in searched
            else:
                assert asked in searched
                taken += 1
        assert 100 < taken < 900  # both verdicts occur

    def test_finds_plans_that_the_whole_program_takes(self):
        overhead = dict.fromkeys(H200.overhead, 0.0)
        graphs = replace(H200, overhead=overhead, microbatch_overhead=0.0)  # nothing to launch
        found = search(task_of(machine=graphs), keep=20)
        for priced in found.best:
            options = parse(shlex.split(" ".join(options_of(priced.plan, "tiny"))), WORLD)
            assert options.layouts == priced.plan.layouts
            assert schedule_of(options.args) == priced.plan.schedule

    def test_keeps_to_the_memory_and_recomputes_where_that_helps(self):
        wide, narrow = (
            search(task_of(LARGE, 8, 64, 12.0, replace(H200, memory_bytes=memory)))
            for memory in (141e9, 120e9)
        )
        for found, limit in ((wide, 141e9), (narrow, 120e9)):
            assert all(peak(priced.memory) <= limit for priced in found.best)
            times = [priced.step.seconds for priced in found.best]
            assert times == sorted(times)
        assert narrow.best[0].step.seconds > wide.best[0].step.seconds
        assert {priced.plan.recompute for priced in narrow.best} & {"moe", "full"}


class TestProgram:
    def plan(self, line: str) -> str:
        words = ["--seq-length", "64", "--global-batch-size", "64", *line.split()]
        return plan_text(words, own_options(words))

    def test_says_and_writes_plans_of_a_machine_or_a_placement(self, tmp_path):
        file = tmp_path / "plans.json"

        def plans(line: str, *parts: str) -> list[dict]:
            shown = self.plan(f"--plan 16 {line} --plan-json {file}")
            for part in ("memory of the best", "run it with", *parts):
                assert part in shown
            return json.loads(file.read_text())["plans"]

        how = "--plan-gpu h100 --plan-gpus-per-node 4 --plan-tiles 1:0.5,3:0.5"
        title = "tiny on 16 GPUs, 4 a node: 64 tokens and 2±1.0 tiles"
        first, *others = plans(how, title, "--nnodes 4")
        assert len(others) == 9
        assert first["step_seconds"] == pytest.approx(sum(first["seconds"].values()))
        apart = plans(f"--placement={NON_COLOCATED}", "12 tiles")  # as many as fit
        assert {plan["placement"] for plan in apart} == {NON_COLOCATED}

    # Bytes of a gradient and of Adam's state, as the documentation of Megatron's distributed
    # optimizer and of Transformer Engine's FusedAdam have them.
    @pytest.mark.parametrize(
        "options, state",
        [
            ("", (4, 12)),
            ("--grad-reduce-in-bf16", (2, 12)),
            ("--use-precision-aware-optimizer", (4, 12)),
            ("--use-precision-aware-optimizer --main-params-dtype fp16", (4, 2 + 8)),
            (
                "--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
                "--exp-avg-sq-dtype=fp8",
                (2, 4 + 2 + 1),
            ),
            (
                "--use-precision-aware-optimizer --optimizer-cpu-offload "
                "--optimizer-offload-fraction 0.75",
                (4, 3),
            ),
        ],
    )
    def test_counts_the_types_that_the_optimizer_keeps(self, options, state, tmp_path):
        file = tmp_path / "plans.json"
        shown = self.plan(f"--plan 2 --device cuda --bf16 {options} --plan-json {file}")
        (plan, *_) = json.loads(file.read_text())["plans"]
        first, *_ = plan["bytes"].values()
        numbers = first["parameters"] / 2
        assert first["gradients"] == state[0] * numbers
        replicas = state[1] * numbers / first["optimizer"]
        assert 1 <= replicas <= 2
        assert shown.rstrip().endswith(options)

    def test_counts_the_loss_of_the_installed_kernel(self, tmp_path, monkeypatch):
        """Logits and gradients in bf16; Megatron's loss has an fp32 softmax and gradient."""
        file, found = tmp_path / "plans.json", []
        for is_installed in (True, False):
            monkeypatch.setattr(arguments, "has_loss_kernel", lambda has=is_installed: has)
            self.plan(f"--plan 2 --device cuda --bf16 --plan-json {file}")
            (plan, *_) = json.loads(file.read_text())["plans"]
            first, *_ = plan["bytes"].values()
            found.append(first["loss"])
        assert found[0] == found[1] * 4 / 10

    def test_prints_a_command_with_all_that_was_planned_with(self, tmp_path):
        """Also a file's options, but none that the plan decides."""
        file = tmp_path / "run.yaml"
        file.write_text(
            "device: cuda\nbf16: true\nmodel: tiny-omni\nuse-precision-aware-optimizer: true\n"
            "main-params-dtype: fp16\nfreeze: encoder\nprompt: What is it?\n"
            "micro-batch-size: 8\nrecompute-granularity: selective\nplan-tiles: 1\n"
        )
        shown = self.plan(f"--plan 2 --config {file} --main-params-dtype fp32 --lr 1e-3")
        command = shlex.split(shown.partition("run it with\n")[2].replace("\\\n", ""))
        program = "examples/mimo/pretrain_nemotron_vlm.py"
        words = command[command.index(program) + 1 :]
        args = parse([*words, "--dry-run", "2"], 2).args
        assert (args.model, args.freeze, args.lr) == ("tiny-omni", "encoder", 1e-3)
        assert args.prompt == "What is it?" and args.main_params_dtype == torch.float32
        assert args.use_precision_aware_optimizer and args.recompute_granularity is None
        names = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert names.count("--micro-batch-size") == 1 and not {"--plan", "--config"} & set(names)

    def test_leaves_no_recompute_to_the_options(self, tmp_path):
        file = tmp_path / "run.yaml"
        file.write_text("recompute-granularity: selective\n")
        line = f"--language planned --recompute-encoder=2 --config {file}".split()
        with pytest.raises(UserError, match="out --recompute-granularity, --recompute-encoder$"):
            planned(line, own_options([*line, "--dry-run", "2"]), 2)

    @pytest.mark.parametrize("more", ["", f"--pack --placement {NON_COLOCATED}"])
    def test_is_run_by_ranks_whose_layouts_are_planned(self, more, monkeypatch):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        line = f"--language planned --global-batch-size 12 --seq-length 64 {more}".split()
        task = task_of(world=6, batch=12, machine=replace(H200, gpus_per_node=2))
        for ranks in (6, 4):
            found = parse(planned(line, own_options(line), ranks), ranks).layouts
            assert found.batch.micro_size == 1 or "--pack" not in more
            assert found.non_colocated or "--placement" not in more
            allowed = candidates(replace(task, world=ranks, seq_length=64))
            assert found in list(allowed)

    @pytest.mark.parametrize(
        "line, reason",
        [
            ("--plan 8 --model none", "--model none"),
            ("--plan 8 --plan-gpu none", "--plan-gpu none"),
            ("--plan 8 --plan-gpus-per-node 0", "must be 1 or more"),
            (f"--plan 7 --global-batch-size 5 {REAL}", "no plan for 7 GPUs"),
            (f"--plan 7 {REAL}", "7 GPUs: the program's rules allow none"),
            (f"--plan 1 {REAL}", "none fits 141 GB; by this model 8 GPUs would do$"),
            ("--plan 8 --plan-tiles 99", "99 tiles of 4 tokens"),
            ("--plan 8 --plan-tiles 1:x", "1:x is not N or N:CHANCE"),
            ("--plan 8 --plan-tiles 1:0", "chances above 0"),
            ("--plan 8 --plan-json /nowhere/plans.json", "/nowhere/plans.json: No such file"),
            ("--plan 8 --language tp=2", "leave out --language"),
        ],
    )
    def test_refuses_in_one_line(self, line, reason):
        with pytest.raises(UserError, match=reason):
            self.plan(line)


BITS, HALF = "the state in 16 bits: .* --exp-avg-sq-dtype bf16", "--seq-length {}"


@pytest.mark.parametrize(
    ("memory", "length", "cures"),
    [
        (4e6, 64, ()),
        (7e6, 64, (BITS,)),
        (9.2e6, 256, (HALF.format(128), BITS)),
        (300e6, 65536, (HALF.format(32768),)),
        (80e6, 65536, (HALF.format(8192),)),
    ],
    ids=["GPUs alone", "16 bits", "both", "half the sequence", "an eighth"],
)
def test_a_refusal_proposes_what_makes_a_plan_fit(memory, length, cures):
    """Nothing shortens the state, which takes 7.9 MB, and 4.4 MB in 16 bits."""
    machine = replace(H200, memory_bytes=memory, reserved_bytes=0.0)
    inputs = (Inputs(length / 16),)
    task = replace(task_of(world=1, batch=1, machine=machine), seq_length=length, inputs=inputs)
    with pytest.raises(UserError, match=", or ".join(["(GPUs would do|other GPUs)", *cures]) + "$"):
        search(task)


class TestPicture:
    """tests/unit_tests/test_process_groups_config.py compares the groups with brute force."""

    @pytest.mark.parametrize(
        "layout, gpus_per_node, crossing",
        [
            # Two nodes are the two stages: each of the 8 pipelines crosses, nothing else does.
            (Layout(1, 2, 2, 4, 4, 1), 8, dict(cp=0, dp=0, pp=8, dp_cp=0, ep=0, expt_dp=0)),
            # A node is half a stage: DP groups 0 2 4 6 and so on cross; EP groups 0-3 do not.
            (Layout(1, 2, 2, 4, 4, 1), 4, dict(cp=0, dp=4, pp=8, dp_cp=2, ep=0, expt_dp=8)),
            # TP groups 0-3 of nodes of 3: 0-2|3, 4 5|6 7, 8|9-11, 12-14|15: all four cross.
            (Layout(4, 1, 1, 4, 4, 1), 3, dict(tp=4, dp=4)),
        ],
    )
    def test_groups_that_leave_a_node_are_counted(
        self, layout, gpus_per_node, crossing, large_world
    ):
        *_, module = modules_of(
            Layouts((Layout(dp=16, etp=1),), layout, Batch(64, 1, 32)), ["images"]
        )
        groups = module.groups
        assert {axis: len(leaving(groups[axis], gpus_per_node)) for axis in crossing} == crossing
        for axis, several in groups.items():
            places = [[module.index(axis)[rank] for rank in group] for group in several]
            assert places == [list(range(len(group))) for group in several]

    @pytest.mark.parametrize(
        "ranks, layouts, ending, begin",
        [
            (128, "--encoder tp=2 --language tp=2,cp=4,pp=2,ep=8", "png", b"\x89PNG"),
            (8, "--model tiny-omni --encoder images:tp=2 --encoder sound:dp=8", "svg", b"<?xml"),
            (8, f"--placement {NON_COLOCATED} --encoder dp=4 --language pp=2", "pdf", b"%PDF"),
        ],
    )
    def test_is_drawn_of_any_layout(self, ranks, layouts, ending, begin, tmp_path):
        file = tmp_path / f"layout.{ending}"
        said = dry_run([*layouts.split(), "--data", "mock", "--picture", str(file)], ranks)
        assert "leave a node" in said and "microbatches" in said
        assert file.read_bytes().startswith(begin)

    def test_that_cannot_be_written_is_refused(self):
        with pytest.raises(UserError, match="--picture /nowhere/layout.png: No such file"):
            dry_run(["--picture", "/nowhere/layout.png"], 8)
