# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The output of tools/show_layout.py, against brute force and numbers found by hand."""

import pytest

import show_layout
from examples.mimo.nemotron_vlm.planner.machine import find_machine
from examples.mimo.nemotron_vlm.planner.step_time import step_time
from layout_view.bridge import leaving
from tests.unit_tests.examples.nemotron_vlm import runs  # noqa: F401  (its parser is quick)

APART = "--placement non-colocated --micro-batch-size 2"


pytestmark = pytest.mark.usefixtures("large_world")


def view_of(encoder, language, world, more=""):
    line = f"--encoder {encoder} --language {language} --world {world} {more}"
    return show_layout.view_of(*show_layout._parser().parse_known_args(line.split()))


class TestGroups:
    """tests/unit_tests/test_process_groups_config.py compares the groups with brute force."""

    @pytest.mark.parametrize(
        "layout, gpus_per_node, leaving",
        [
            # Two nodes are the two stages: each of the 8 pipelines crosses, nothing else does.
            ("cp=2,pp=2,dp=4,ep=4", 8, dict(tp=0, cp=0, dp=0, pp=8, dp_cp=0, ep=0, expt_dp=0)),
            # A node is half a stage: DP groups 0 2 4 6 and so on cross; EP groups 0-3 do not.
            ("cp=2,pp=2,dp=4,ep=4", 4, dict(tp=0, cp=0, dp=4, pp=8, dp_cp=2, ep=0, expt_dp=8)),
            # TP groups 0-3 of nodes of 3: 0-2|3, 4 5|6 7, 8|9-11, 12-14|15: all four cross.
            ("tp=4,dp=4,ep=4", 3, dict(tp=4, dp=4, pp=0)),
        ],
    )
    def test_that_leave_a_node_are_counted(self, layout, gpus_per_node, leaving):
        view = view_of("tp=1", layout, 16, f"--plan-gpus-per-node {gpus_per_node}")
        module = view.modules[1]
        assert {axis: len(view.leaving(module.groups[axis])) for axis in leaving} == leaving
        for axis, groups in module.groups.items():
            for group in groups:
                places = [module.index[axis][rank] for rank in group]
                assert places == list(range(module.sizes[axis]))


class TestBridge:
    def test_volumes_are_those_of_the_documentation(self):
        """docs/reviewer/pipeline.md: b·max(0, 1/L − 1/E), b·(1/E − min(1/E, 1/L)/cp), b/E."""
        more = "--plan-gpus-per-node 4 --microbatches 4 --plan-tiles 2"
        view = view_of("dp=8", "cp=2,pp=2,dp=2", 8, more)
        assert view.rows_per_sample == 2 * 4
        rows = view.layouts.batch.global_size * view.rows_per_sample
        forward, backward = (way.sum(axis=0).tolist() for way in view.bridge[2:])
        assert forward == [rows * (1 / 2 - 1 / 8)] * 4 + [0] * 4
        assert backward == [rows * (1 / 8 - 1 / 8 / 2)] * 4 + [rows / 8] * 4
        assert view.bridge.blocks == [[0, 1, 4, 5], [2, 3, 6, 7]]
        assert len(view.leaving(view.bridge.blocks)) == 2
        # Ranks of stage 0 take from stage 1, but also from each other.
        assert 0 < leaving(view.bridge.forward, 4) < 1
        assert leaving(view.bridge.forward, 8) == 0
        same = view_of("dp=8", "dp=8", 8).bridge  # ranks encode what they consume
        assert same.forward.nnz == same.backward.nnz == 0

    @pytest.mark.parametrize(
        "encoder, language, givers, takers, blocks",
        [
            ("dp=4", "cp=2,dp=2", [0, 1, 2, 3], [4, 4, 6, 6], [[0, 1, 4], [2, 3, 6]]),
            ("tp=2,dp=2", "dp=4", [1, 1, 3, 3], [4, 5, 6, 7], [[1, 4, 5], [3, 6, 7]]),
        ],
    )
    def test_of_non_colocated_modules_is_megatrons(self, encoder, language, givers, takers, blocks):
        view = view_of(encoder, language, 8, APART)
        way, back = view.bridge.forward, view.bridge.backward
        pairs = set(zip(givers, takers, strict=True))
        assert set(zip(way.row, way.col, strict=True)) == pairs
        assert set(zip(back.col, back.row, strict=True)) == pairs
        assert view.bridge.blocks == blocks
        assert way.sum() == view.layouts.batch.global_size * view.rows_per_sample


def test_the_timeline_is_the_planners():
    again = "--recompute-granularity selective --recompute-modules moe"
    view = view_of("tp=1", "pp=4", 8, f"--microbatches 6 --plan-tiles 2 {again}")
    step, h200 = step_time(view.plan, find_machine("h200")), find_machine("h200")
    assert (view.plan.inputs[0].mean, view.plan.recompute) == (2.0, "moe")
    after = sum(step.parts[part] for part in ("gradients", "optimizer")) + h200.step_overhead
    assert view.total == pytest.approx(step.seconds - after)
    busy = sum(end - begin for spans in view.timeline.values() for _, begin, end in spans)
    assert view.bubble == pytest.approx(1 - busy / 4 / view.total)


@pytest.mark.parametrize("ending, begin", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_says_and_draws_4096_ranks_without_a_process(ending, begin, tmp_path, capsys):
    line = "--encoder tp=2 --language tp=2,cp=8,pp=8,ep=8 --world 4096 --seq-length 4096"
    assert show_layout.main(f"{line} --png {tmp_path}/layout.{ending}".split()) == 0
    said = capsys.readouterr()
    assert said.err == ""
    for part in ("4096 ranks, 512 nodes", "of the first 16 ranks", "groups", "bridge", "timeline"):
        assert part in said.out
    assert (tmp_path / f"layout.{ending}").read_bytes().startswith(begin)


@pytest.mark.parametrize(
    "line, reason",
    [
        ("--encoder tp=3 --world 8", "= 3 must divide the 8 ranks: 3·dp is never 8"),
        ("--language pp=2,vpp=2 --world 8 --microbatches 3", "must divide the 3 microbatches"),
        ("--world 8 --model none", "--model none"),
        ("--world 8 --model tiny-omni", "models of one encoder are shown, not of images and"),
        ("--world 8 --plan-gpu none", "GPU none"),
        ("--world 8 --plan-tiles 99", "99 tiles of 4 tokens do not fit"),
        ("--world 8 --encoder-schedule bubbles", "with pp of 2 or more"),
        ("--world 1 --png /nowhere/layout.png", "/nowhere/layout.png"),
        ("--world 0", "0 is not a number of 1 or more"),
        ("--plan-tiles 8", "required: --world"),
    ],
)
def test_refuses_in_one_line(line, reason, capsys):
    try:
        status = show_layout.main(line.split())
    except SystemExit as ended:  # of the parser
        status = ended.code
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2 and line.startswith("error: ") and reason in line
