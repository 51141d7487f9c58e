# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The planner's time: its pieces against Megatron's counts, rank maps and closed forms."""

from __future__ import annotations

import random
from argparse import Namespace
from dataclasses import asdict, replace

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

pytest.importorskip("megatron.core.models.mimo.comm", reason="needs the applied checkout")

import mini  # noqa: E402, F401  (makes tools importable)
from examples.mimo.common.layout import Batch, Layout, parse_layout  # noqa: E402
from examples.mimo.common.layout_rules import CHUNKWISE  # noqa: E402
from examples.mimo.nemotron_vlm.model.model import placed  # noqa: E402
from examples.mimo.nemotron_vlm.model.presets import find_preset  # noqa: E402
from examples.mimo.nemotron_vlm.options.layout_rules import resolve  # noqa: E402
from examples.mimo.nemotron_vlm.planner import flops  # noqa: E402
from examples.mimo.nemotron_vlm.planner.communication import (  # noqa: E402
    Group,
    all_reduce,
    all_to_all,
    groups_of,
    replicas_of,
    ring,
)
from examples.mimo.nemotron_vlm.planner.costs import after_backward, bridge_seconds  # noqa: E402
from examples.mimo.nemotron_vlm.planner.machine import find_machine  # noqa: E402
from examples.mimo.nemotron_vlm.planner.plan import Plan, Tiles  # noqa: E402
from examples.mimo.nemotron_vlm.planner.schedule import Encoders, simulate  # noqa: E402
from examples.mimo.nemotron_vlm.planner.step_time import estimate, step_time  # noqa: E402
from layout_view.view import View  # noqa: E402
from megatron.core.models.mimo.schedule.bubble_plan import ENCODE, Costs, bubble_plan  # noqa: E402
from megatron.core.models.mimo.setup.module_groups import make_modules  # noqa: E402
from megatron.training.training import num_floating_point_operations  # noqa: E402

H200 = find_machine("h200")


@pytest.fixture(autouse=True)
def large_world(monkeypatch):
    """Grids of any size here fit in this world."""
    monkeypatch.setenv("WORLD_SIZE", "4096")


def plan_of(encoder, language, world, microbatches=8, micro=1, model="tiny", **how) -> Plan:
    preset = find_preset(model)
    asked = parse_layout(encoder, "encoder"), parse_layout(language, "language")
    placement = how.pop("placement", "colocated")
    dp = asked[1].dp or world // (asked[1].tp * asked[1].cp * asked[1].pp)
    batch = Batch(microbatches * micro * dp, micro, preset.seq_length)
    layouts = resolve(*asked, batch, world, preset, placement, CHUNKWISE)
    return Plan(preset, layouts, Tiles(2.0), **how)


class TestFlops:
    @pytest.mark.parametrize("kind", ["*", "E", "G", "-", "M"])
    def test_of_a_layer_and_the_logits_are_megatrons(self, kind):
        """Mamba-2 has heads as wide as Megatron takes them to be, twice the hidden size; the
        planner counts the router as well."""
        p = replace(find_preset("tiny-gdn").language, hybrid_layer_pattern=kind, mamba_head_dim=4)
        p = replace(p, mamba_num_heads=2 * p.hidden_size // 4, ffn_hidden_size=4 * p.hidden_size)
        args = Namespace(
            **asdict(p),
            seq_length=64,
            hybrid_override_pattern=kind,
            is_hybrid_model=True,
            group_query_attention=True,
            swiglu=False,
            moe_latent_size=None,
            mtp_num_layers=0,
            num_layers=1,
            padded_vocab_size=p.vocab_size,
            linear_conv_kernel_dim=4,
            experimental_attention_variant=None,
        )
        one = Layout(dp=1, etp=1)
        mine = [flops.language_layer(kind, p, one, 3, 64), flops.head(p, one, 3, 64)]
        counted = 3 * sum(sum(work.values()) for work in mine)
        router = 3 * 2 * 3 * 64 * p.hidden_size * p.num_experts if kind == "E" else 0
        assert counted - router == pytest.approx(num_floating_point_operations(args, 3))

    def test_of_ranks_add_up_to_one_ranks(self):
        p = find_preset("nano-vl-30b-a3b").language
        split, whole = Layout(tp=2, cp=4, dp=1, ep=4, etp=1), Layout(dp=1, etp=1)
        for kind in "*ME":
            of_rank = flops.language_layer(kind, p, split, 1, 8192)
            alone = flops.language_layer(kind, p, whole, 1, 8192)
            assert {k: 8 * v for k, v in of_rank.items()} == pytest.approx(alone)


class TestCommunication:
    @pytest.mark.parametrize(
        "language, world, gpus_per_node",
        [("tp=2,cp=2,pp=2,ep=4,etp=1", 64, 8), ("cp=4,pp=4,ep=2", 32, 8), ("ep=8", 16, 4)],
    )
    def test_groups_are_those_of_the_rank_map(self, language, world, gpus_per_node):
        plan = plan_of("tp=1", language, world)
        module = View(plan.layouts, gpus_per_node, 4, 0.3).modules[1]
        for name, group in groups_of(plan.layouts.language, gpus_per_node).items():
            first = module.axes[name].groups[0]
            assert group == Group(len(first), len({rank // gpus_per_node for rank in first}))

    @pytest.mark.parametrize(
        "language, world, rank",
        [("tp=2,cp=4,pp=4,ep=8,etp=1", 4096, 2777), ("tp=4,cp=2,pp=2,ep=4", 512, 300)],
    )
    def test_groups_are_those_that_one_rank_of_thousands_makes(self, language, world, rank):
        plan = plan_of("tp=4", language, world)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            encoder, module = make_modules(placed(plan.layouts), "fake").values()
            made = {
                name: getattr(module.groups, name) for name in groups_of(plan.layouts.language, 8)
            }
            found = {name: dist.get_process_group_ranks(group) for name, group in made.items()}
            found["encoder dp"] = dist.get_process_group_ranks(encoder.groups.dp)
            for each in (encoder, module):
                each.grid.destroy()
        finally:
            dist.destroy_process_group()
        expected = groups_of(plan.layouts.language, 8)
        expected["encoder dp"] = replicas_of(plan.layouts, 8)[0]
        for name, ranks in found.items():
            assert expected[name] == Group(len(ranks), len({r // 8 for r in ranks})), name

    def test_collectives_take_the_slowest_links(self):
        machine = replace(H200, node_latency=0.0, network_latency=0.0)
        inside, across = Group(8, 1), Group(8, 8)
        assert ring(machine, inside, 8.0) == pytest.approx(7 / machine.node_speed)
        assert ring(machine, across, 8.0) == pytest.approx(7 / machine.network_speed)
        assert all_to_all(machine, across, 8.0) == pytest.approx(7 / machine.network_speed)
        eight_adapters = min(machine.node_speed, 8 * machine.network_speed)
        assert ring(machine, Group(16, 2), 16.0) == pytest.approx(15 / eight_adapters)
        assert all_reduce(machine, Group(16, 2), 16.0) == pytest.approx(30 / eight_adapters)

    def test_an_all_reduce_takes_the_steps_of_a_tree(self):
        machine = replace(H200, node_latency=1.0, network_latency=10.0)
        assert all_reduce(machine, Group(1, 1)) == 0
        assert all_reduce(machine, Group(8, 1)) == pytest.approx(2 * 3)
        assert all_reduce(machine, Group(32, 4)) == pytest.approx(2 * (3 + 2 * 10))

    @pytest.mark.parametrize(
        "language, world",
        [("cp=2,pp=2", 8), ("dp=8", 8), ("tp=2,cp=2", 8), ("tp=2,cp=4,pp=4", 4096)],
    )
    def test_the_bridge_moves_what_its_own_plan_moves(self, language, world):
        plan = plan_of("tp=1", language, world)
        view = View(plan.layouts, world, 2 * plan.preset.encoder.tokens_per_tile, 0.3)
        rows = view.bridge.forward.received(world) + view.bridge.backward.received(world)
        machine = replace(H200, node_latency=0.0)
        row = plan.preset.language.hidden_size * machine.precision
        most = max(rows) * row / machine.node_speed
        found = bridge_seconds(plan, machine, world)
        assert 0.99 * most <= found <= 1.5 * most  # the most of both ways may be on two ranks


class TestStep:
    @pytest.mark.parametrize(
        "encoder, language, placement",
        [
            ("dp=8", "dp=8,ep=4", "colocated"),
            ("dp=8", "cp=2,pp=4", "colocated"),
            ("dp=8", "pp=2,vpp=2,ep=2", "colocated"),
            ("dp=4", "dp=4,ep=4", "non-colocated"),
        ],
    )
    def test_has_no_time_unaccounted_and_the_estimate_is_close(self, encoder, language, placement):
        plan = plan_of(encoder, language, 8, microbatches=16, placement=placement)
        exact = step_time(plan, H200, 8)
        assert sum(exact.parts.values()) == pytest.approx(exact.seconds, rel=1e-6)
        assert estimate(plan, H200, 8) == pytest.approx(exact.seconds, rel=0.05)
        for line in exact.spans:
            assert all(a[2] <= b[1] + 1e-9 for a, b in zip(line, line[1:], strict=False))

    def test_of_equal_stages_has_the_bubble_of_1f1b(self):
        free = {kind: 0.0 for kind in H200.overhead}
        machine = replace(H200, overhead=free | {"M": 1.0, "E": 1.0, "*": 1.0})
        machine = replace(machine, node_latency=0.0, microbatch_overhead=0.0)
        plan = plan_of("dp=4", "pp=4", 4, microbatches=8)  # of 8 layers, 2 a stage
        assert step_time(plan, machine, 8).parts["bubble"] == pytest.approx(3 * 2.0, rel=0.01)

    @pytest.mark.parametrize("macro_batch", [1, 4])
    def test_in_bubbles_is_shorter_than_in_three_phases(self, macro_batch):
        phases = plan_of("dp=8", "pp=4,dp=2,ep=2", 8, model="nano-vl-30b-a3b")
        phases = replace(phases, images=Tiles(12.0))
        bubbles = replace(phases, in_bubbles=True, macro_batch=macro_batch)
        graphs = replace(H200, overhead=dict.fromkeys(H200.overhead, 0.0))  # nothing to launch
        before, after = (step_time(plan, graphs, 8) for plan in (phases, bubbles))
        assert before.seconds - before.parts["bubble"] < after.seconds < before.seconds
        assert sum(after.parts.values()) == pytest.approx(after.seconds, rel=1e-6)
        assert estimate(bubbles, graphs, 8) == pytest.approx(after.seconds, rel=0.1)

    def test_on_shared_cores_takes_what_all_ranks_have_to_do(self):
        plan = plan_of("dp=8", "pp=4,dp=2", 8)
        alone = step_time(plan, H200, 8)
        shared = step_time(plan, replace(H200, shared_cores=2), 8)
        assert shared.seconds == pytest.approx(max(alone.seconds, alone.work / 2))
        assert shared.seconds > alone.seconds

    def test_all_ranks_work_counts_each_message_where_it_is_sent_and_received(self):
        plan = plan_of("dp=4", "pp=4", 4, microbatches=8)

        def seconds(latency):
            machine = replace(H200, node_latency=latency)
            once = sum(after_backward(plan, machine, 8)) + bridge_seconds(plan, machine, 8)
            return step_time(plan, machine, 8).work - 4 * once

        of_a_boundary = 2 * 2  # forward and backward, on both of its ranks
        assert seconds(1.0) - seconds(0.0) == pytest.approx(8 * 3 * of_a_boundary)

    def test_recompute_and_imbalance_cost_time(self):
        def seconds(**how):
            plan = plan_of("dp=8", "ep=8", 8, model="nano-vl-30b-a3b", **how)
            return step_time(plan, H200, 8).seconds

        assert seconds() < seconds(recompute="moe") < seconds(recompute="full")
        assert seconds() < seconds(imbalance=1.5)


class TestBubbles:
    def test_are_filled_as_the_plan_says(self):
        """The planner's simulation of a plan's pieces is the one by which the plan was made."""
        for seed in range(200):
            rng = random.Random(seed)
            stages, vpp, macro_batch = rng.randint(2, 5), rng.randint(1, 3), rng.randint(1, 4)
            number, costs = 2 * stages, Costs(*(10 ** rng.uniform(-2, 2) for _ in range(4)))
            plan = bubble_plan(stages, number, macro_batch, vpp, costs=costs)

            def operation(way, _, costs=costs):
                return getattr(costs, way)

            def piece(kind, k, number=number, size=macro_batch, costs=costs):
                each = costs.encode if kind == ENCODE else costs.encoder_backward
                return min(size, number - k * size) * each

            encoders = Encoders(plan.before, macro_batch, piece)
            spans = simulate(["language"] * stages, operation, number, vpp, encoders=encoders)
            assert max(line[-1][2] for line in spans) == pytest.approx(plan.seconds), seed


class TestTiles:
    def test_mean_and_deviation_are_those_of_the_chances(self):
        assert Tiles.of({1: 1, 3: 1}) == Tiles(2.0, 1.0)
        assert Tiles.of({4: 0.2}) == Tiles(4.0, 0.0)

    def test_vary_between_ranks_of_a_non_colocated_encoder_only(self):
        apart = plan_of("dp=4", "dp=4", 8, placement="non-colocated", micro=4)
        varied = replace(apart, images=Tiles(2.0, 1.0))
        assert apart.most_tiles() == 8.0 < varied.most_tiles()
        colocated = replace(plan_of("dp=8", "dp=8", 8, micro=4), images=Tiles(2.0, 1.0))
        assert colocated.most_tiles() == 8.0
