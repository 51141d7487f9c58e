# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The output of tools/show_layout.py, against brute force and numbers found by hand."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest

pytest.importorskip("megatron.core.models.mimo.comm", reason="needs the applied checkout")

import show_layout  # noqa: E402
from examples.mimo.common.errors import UserError  # noqa: E402
from examples.mimo.nemotron_vlm.model.presets import find_preset  # noqa: E402
from examples.mimo.nemotron_vlm.planner.schedule import pipeline  # noqa: E402
from layout_view.modules import read_layouts  # noqa: E402
from layout_view.text import describe  # noqa: E402
from layout_view.view import View  # noqa: E402
from megatron.core.models.mimo.schedule.bubble_plan import Costs, bubble_plan  # noqa: E402

README = ["--encoder", "tp=2,dp=4", "--language", "cp=2,pp=2,dp=2,ep=2", "--world", "8"]
LAYOUTS = [
    ("tp=2,dp=4", "cp=2,pp=2,dp=2,ep=2", 8),
    ("tp=4", "tp=2,cp=2,pp=2,ep=4,etp=1", 16),
    ("tp=1", "tp=4,pp=4,ep=2,etp=2", 64),
    ("dp=12,tp=2", "cp=2,pp=4,dp=3", 24),
]
DENSE, EXPERT = ("tp", "cp", "dp", "pp"), ("expt_tp", "ep", "expt_dp", "pp")


@pytest.fixture(autouse=True)
def large_world(monkeypatch):
    """Grids of any size here fit in this world."""
    monkeypatch.setenv("WORLD_SIZE", "4096")


def view_of(encoder, language, world, placement="colocated", share=0.3, nodes_of=8, **batch):
    layouts = read_layouts(encoder, language, world, find_preset("tiny"), placement, **batch)
    return View(layouts, nodes_of, 4, share)


def enumerate_groups(sizes: dict[str, int], over: tuple[str, ...]) -> set[tuple[int, ...]]:
    """Groups of ranks that differ only in the axes ``over``; the first of ``sizes`` is fastest."""
    groups: dict[tuple, list[int]] = {}
    places = itertools.product(*(range(size) for size in reversed(sizes.values())))
    for rank, reversed_place in enumerate(places):
        place = dict(zip(sizes, reversed(reversed_place), strict=True))
        groups.setdefault(tuple(place[a] for a in sizes if a not in over), []).append(rank)
    return {tuple(group) for group in groups.values()}


class TestGroups:
    @pytest.mark.parametrize("encoder, language, world", LAYOUTS)
    def test_are_those_of_brute_force(self, encoder, language, world):
        for module in view_of(encoder, language, world).modules:
            layout = module.layout
            dense = {axis: getattr(layout, axis) for axis in DENSE}
            experts = dict(
                zip(EXPERT, (layout.etp, layout.ep, layout.expt_dp, layout.pp), strict=True)
            )
            for name, axis in module.axes.items():
                over = {"dp_cp": ("dp", "cp")}.get(name, (name,))
                sizes = experts if name in ("ep", "expt_tp", "expt_dp") else dense
                assert set(map(tuple, axis.groups)) == enumerate_groups(sizes, over)
                assert axis.size == math.prod(sizes[a] for a in over)
                assert all(
                    axis.index[rank] == group.index(rank) for group in axis.groups for rank in group
                )

    @pytest.mark.parametrize(
        "layout, gpus_per_node, leaving",
        [
            # Two nodes are the two stages: each of the 8 pipelines crosses, nothing else does.
            ("cp=2,pp=2,dp=4,ep=4", 8, dict(tp=0, cp=0, dp=0, pp=8, dp_cp=0, ep=0, expt_dp=0)),
            # A node is half a stage: DP groups 0 2 4 6 and so on cross; EP groups 0-3 do not.
            ("cp=2,pp=2,dp=4,ep=4", 4, dict(tp=0, cp=0, dp=4, pp=8, dp_cp=2, ep=0, expt_dp=8)),
            # TP groups 0-3 of nodes of 3: 0-2|3, 4 5|6 7, 8|9-11, 12-14|15: all four cross.
            ("tp=4,dp=4,ep=4", 3, dict(tp=4, dp=4, pp=0)),
            ("dp=16,ep=8", 16, dict(dp=0, ep=0, expt_dp=0)),
        ],
    )
    def test_that_leave_a_node_are_counted(self, layout, gpus_per_node, leaving):
        view = view_of("tp=1", layout, 16)
        axes = view.modules[1].axes
        assert {name: axes[name].leaving(gpus_per_node) for name in leaving} == leaving

    def test_of_non_colocated_modules_begin_at_the_modules_first_rank(self):
        view = view_of("pp=2,dp=2", "pp=2,cp=2,ep=2", 8, "non-colocated", micro_batch_size=2)
        encoder, language = (module.axes for module in view.modules)
        assert encoder["pp"].groups == [[0, 2], [1, 3]]
        assert language["ep"].groups == [[4, 5], [6, 7]]


class TestBridge:
    def test_volumes_are_those_of_the_documentation(self):
        """docs/reviewer/pipeline.md: b·max(0, 1/L − 1/E), b·(1/E − min(1/E, 1/L)/cp), b/E."""
        view = view_of("dp=8", "cp=2,pp=2,dp=2", 8, microbatches=4)
        rows = view.layouts.batch.global_size * view.rows_per_sample
        forward = view.bridge.forward.received(8).tolist()
        backward = view.bridge.backward.received(8).tolist()
        assert forward == [rows * (1 / 2 - 1 / 8)] * 4 + [0] * 4
        assert backward == [rows * (1 / 8 - 1 / 8 / 2)] * 4 + [rows / 8] * 4

    def test_blocks_are_those_of_the_bridge(self):
        view = view_of("dp=8", "cp=2,pp=2,dp=2", 8, nodes_of=4)
        assert view.bridge.blocks == [[0, 1, 4, 5], [2, 3, 6, 7]]
        assert view.blocks_leaving == 2
        # Ranks of stage 0 take from stage 1, but also from each other.
        assert 0 < view.bridge.forward.leaving(4) < 1
        assert view.bridge.forward.leaving(8) == 0

    def test_nothing_moves_where_ranks_encode_what_they_consume(self):
        view = view_of("dp=8", "dp=8", 8)
        assert view.bridge.forward.total == view.bridge.backward.total == 0

    @pytest.mark.parametrize(
        "encoder, language, givers, takers, blocks",
        [
            ("dp=4", "cp=2,dp=2", [0, 1, 2, 3], [4, 4, 6, 6], [[0, 1, 4], [2, 3, 6]]),
            ("tp=2,dp=2", "dp=4", [1, 1, 3, 3], [4, 5, 6, 7], [[1, 4, 5], [3, 6, 7]]),
        ],
    )
    def test_of_non_colocated_modules_is_megatrons(self, encoder, language, givers, takers, blocks):
        view = view_of(encoder, language, 8, "non-colocated", micro_batch_size=2)
        way, back = view.bridge.forward, view.bridge.backward
        assert (way.givers.tolist(), way.takers.tolist()) == (givers, takers)
        assert (back.givers.tolist(), back.takers.tolist()) == (takers, givers)
        assert view.bridge.blocks == blocks
        assert way.total == view.layouts.batch.global_size * view.rows_per_sample


class TestTimeline:
    @pytest.mark.parametrize("pp, vpp, microbatches", [(1, 1, 3), (2, 1, 1), (4, 1, 6), (8, 1, 16)])
    @pytest.mark.parametrize("share", [0.2, 0.5])
    def test_takes_what_the_formula_says(self, pp, vpp, microbatches, share):
        view = view_of("tp=1", f"pp={pp}", 8, share=share, microbatches=microbatches)
        expected = share + (1 - share) * (1 + (pp - 1) / microbatches)
        assert view.timeline.total == pytest.approx(expected)
        assert view.timeline.bubble == pytest.approx(1 - 1 / expected)

    def test_virtual_stages_divide_the_bubble(self):
        view = view_of("tp=1", "pp=4,vpp=2", 8, microbatches=8)
        assert view.timeline.total == pytest.approx(0.3 + 0.7 * (1 + 3 / (8 * 2)))

    def test_every_rank_works_as_long_as_its_share(self):
        view = view_of("pp=2,dp=2", "pp=2,cp=2", 8, "non-colocated", micro_batch_size=2)
        busy = [sum(end - begin for _, begin, end in spans) for spans in view.timeline.stages]
        assert busy == pytest.approx([0.6, 0.6, 1.4, 1.4])  # half of the ranks for each module

    @pytest.mark.parametrize("share", [0.3, 0.5])
    @pytest.mark.parametrize("pp, vpp, microbatches, macro_batch", [(4, 1, 8, 1), (2, 2, 4, 2)])
    def test_in_bubbles_is_the_plan_that_training_runs_by(
        self, share, pp, vpp, microbatches, macro_batch
    ):
        phases = view_of("tp=1", f"pp={pp},vpp={vpp}", 8, share=share, microbatches=microbatches)
        line = replace(phases, in_bubbles=True, macro_batch=macro_batch).timeline
        costs = Costs.of_share(share, vpp)
        plan = bubble_plan(pp, microbatches, macro_batch, vpp, costs=costs)
        encoder = microbatches * (costs.encode + costs.encoder_backward)
        language = microbatches * vpp * (costs.forward + costs.backward)
        formula = encoder + language * (1 + (pp - 1) / (microbatches * vpp))
        assert line.total / phases.timeline.total == pytest.approx(plan.seconds / formula)
        for spans in line.stages:
            assert sum(end - begin for _, begin, end in spans) == pytest.approx(1)

    @pytest.mark.parametrize("vpp", [1, 2])
    def test_spans_of_a_stage_do_not_overlap(self, vpp):
        for spans in pipeline(["language"] * 4, {"language": 1.0}, 8, vpp):
            assert len(spans) == 2 * 8 * vpp
            for before, after in itertools.pairwise(spans):
                assert before[2] <= after[1] + 1e-12


class TestProgram:
    def test_says_and_draws_it(self, tmp_path, capsys):
        files = {kind: tmp_path / f"layout.{kind}" for kind in ("png", "svg", "json")}
        drawn = itertools.chain(*((f"--{kind}", str(file)) for kind, file in files.items()))
        assert show_layout.main([*README, *drawn]) == 0
        said = capsys.readouterr()
        assert said.err == ""
        for part in ("8 ranks, 1 node", "rank map", "groups", "bridge: 2 blocks", "timeline"):
            assert part in said.out
        assert files["png"].read_bytes().startswith(b"\x89PNG")
        assert ElementTree.parse(files["svg"]).getroot().tag.endswith("svg")
        data = json.loads(files["json"].read_text())
        assert data["modules"]["language"]["axes"]["pp"]["groups"][0] == [0, 4]
        assert len(data["modules"]["encoder"]["coordinates"]) == 8

    @pytest.mark.parametrize(
        "arguments, reason",
        [
            (["--encoder", "tp=3", "--world", 8], "tp=3 must divide the 8 attention heads"),
            (["--language", "pp", "--world", 8], "'pp' is not AXIS=SIZE"),
            (["--language", "dp=4", "--world", 8], "must equal the 8 ranks"),
            (["--world", 8, "--model", "none"], "--model none"),
            (["--world", 8, "--encoder-schedule", "bubbles"], "with pp of 2 or more"),
            (["--world", 1, "--png", "/nowhere/layout.png"], "/nowhere/layout.png"),
        ],
    )
    def test_refuses_in_one_line(self, arguments, reason, capsys):
        assert show_layout.main([str(argument) for argument in arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and reason in line

    @pytest.mark.parametrize(
        "arguments",
        [["--world", "0"], ["--world", "8", "--encoder-share", "1.5"], ["--gpus-per-node", "8"]],
    )
    def test_refuses_values_that_are_none(self, arguments, capsys):
        with pytest.raises(SystemExit) as ended:
            show_layout.main(arguments)
        assert ended.value.code == 2
        assert "error: " in capsys.readouterr().err

    def test_takes_the_programs_rules(self):
        with pytest.raises(UserError, match="pp=2 must divide the 3 microbatches"):
            view_of("tp=1", "pp=2,vpp=2", 8, microbatches=3)
        with pytest.raises(UserError, match="sequence length 32 must be a multiple of 64"):
            view_of("tp=1", "cp=32", 32)
        assert view_of("tp=1", "cp=32", 32, seq_length=64).layouts.language.cp == 32


def test_4096_ranks_need_no_processes(tmp_path):
    from layout_view.picture import draw

    view = view_of("tp=2", "tp=2,cp=8,pp=8,ep=8", 4096, seq_length=4096)
    text = describe(view)
    draw(view, tmp_path / "layout.png", "png")
    data = view.data()
    assert "4096 ranks, 512 nodes" in text and "of the first 16 ranks" in text
    assert len(data["modules"]["language"]["axes"]["dp"]["groups"]) == 128
    assert (tmp_path / "layout.png").stat().st_size > 0
