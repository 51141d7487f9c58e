# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The planner's pieces: against Megatron's counts, models, groups and orders, and closed forms."""

from argparse import Namespace
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from examples.mimo.common.layout import (
    Batch,
    Layout,
    parse_layout,
)
from examples.mimo.nemotron_vlm.model.model import placed
from examples.mimo.nemotron_vlm.model.presets import find_preset
from examples.mimo.nemotron_vlm.options.arguments import parse
from examples.mimo.nemotron_vlm.options.layout_rules import resolve
from examples.mimo.nemotron_vlm.planner import layers
from examples.mimo.nemotron_vlm.planner import parameters as params
from examples.mimo.nemotron_vlm.planner.inputs import Inputs
from examples.mimo.nemotron_vlm.planner.machine import (
    Group,
    find_machine,
    groups_of,
    replicas_of,
)
from examples.mimo.nemotron_vlm.planner.memory import most_in_flight
from examples.mimo.nemotron_vlm.planner.plan import Plan
from examples.mimo.nemotron_vlm.planner.schedule import (
    Cost,
    Stage,
    Work,
    stages_of_pipeline,
    timeline,
)
from examples.mimo.nemotron_vlm.planner.step_time import (
    bridge_seconds,
    estimate,
    step_time,
)
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.mimo.bridge.plan import NOBODY, plan_block
from megatron.core.models.mimo.bridge.topology import bridge_topology
from megatron.core.models.mimo.setup.module_groups import make_grid, make_modules
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training.training import num_floating_point_operations

H200 = find_machine("h200")
GRAPHS = replace(H200, overhead=dict.fromkeys(H200.overhead, 0.0), microbatch_overhead=0.0)
"""An H200 whose host has nothing to launch."""
LARGE = "nano-vl-30b-a3b"


pytestmark = pytest.mark.usefixtures("large_world")


def plan_of(encoder, language, world, microbatches=8, micro=1, model="tiny", **how) -> Plan:
    preset = find_preset(model)
    asked = parse_layout(encoder, "encoder"), parse_layout(language, "language")
    placement = how.pop("placement", "colocated")
    dp = asked[1].dp or world // (asked[1].tp * asked[1].cp * asked[1].pp)
    batch = Batch(microbatches * micro * dp, micro, preset.seq_length)
    layouts = resolve(asked[:1], asked[1], batch, world, preset, placement)
    return Plan(preset, layouts, (Inputs(2.0),), **how)


class TestLayers:
    @pytest.mark.parametrize("kind", "*EG-M")
    def test_operations_of_a_layer_and_the_logits_are_megatrons(self, kind):
        """Mamba-2 has heads as wide as Megatron takes them to be, twice the hidden size; the
        planner counts the router as well."""
        p = replace(find_preset("tiny-gdn").language, hybrid_layer_pattern=kind, mamba_head_dim=4)
        p = replace(p, mamba_num_heads=2 * p.hidden_size // 4, ffn_hidden_size=4 * p.hidden_size)
        others = "moe_latent_size experimental_attention_variant gdp_num_householder"
        args = Namespace(
            **asdict(p),
            **dict.fromkeys(others.split()),
            **dict.fromkeys(("is_hybrid_model", "group_query_attention"), True),
            seq_length=64,
            hybrid_override_pattern=kind,
            swiglu=False,
            mtp_num_layers=0,
            num_layers=1,
            padded_vocab_size=p.vocab_size,
            linear_conv_kernel_dim=4,
        )
        for lay in (Layout(dp=1, etp=1), Layout(tp=2, cp=4, dp=1, ep=4, etp=1)):
            batch = layers.RankBatch(p, lay, 3, 64, fused=True)
            mine = layers.language_layer(kind, batch), layers.head(batch)
            counted = 3 * lay.size * sum(sum(layer.work.values()) for layer in mine)
            router = 3 * 2 * 3 * 64 * p.hidden_size * p.num_experts if kind == "E" else 0
            assert counted - router == pytest.approx(num_floating_point_operations(args, 3))


class TestParameters:
    @pytest.mark.parametrize(
        "model, world, encoder, language, placement, rank",
        [
            (LARGE, 64, "tp=8", "tp=2,pp=4,ep=8,etp=1", "colocated", 63),
            (f"{LARGE}-gdn", 4096, "tp=4", "tp=2,cp=4,pp=4,ep=16", "colocated", 1500),
            ("tiny-gdn", 8, "tp=2,pp=2", "tp=2,pp=2,ep=2,etp=1", "non-colocated", 7),
            ("tiny-gdn", 8, "tp=2,pp=2", "tp=2,pp=2,ep=2,etp=1", "non-colocated", 2),
            ("tiny", 8, "tp=2", "pp=2,vpp=2,ep=4", "colocated", 0),
        ],
    )
    def test_are_those_of_the_rank_s_own_model(
        self, model, world, encoder, language, placement, rank
    ):
        layouts = ["--encoder", encoder, "--language", language, "--placement", placement]
        batch = ["--global-batch-size", str(2 * world), "--micro-batch-size", "1"]
        options = parse(["--model", model, *layouts, *batch], world)
        lay = options.layouts
        with params.stages_on_meta(options, rank) as stages:
            found = params.by_place(stages)
        held, projector = {"encoders": [0], "dense": 0, "experts": 0}, 0
        for place, parameters in found.items():
            elements = params.aligned([parameter.size for parameter in parameters])
            if isinstance(place, tuple):
                held["encoders"][0] += elements
                projector += elements * (place[1] == params.PROJECTOR)
            else:
                held["experts" if place == params.EXPERT else "dense"] += elements
        stages = [stage for stage in stages_of_pipeline(lay) for _ in range(stage.ranks)]
        wanted = *held["encoders"], held["dense"], held["experts"]
        assert params.held(options.preset, lay, stages[rank]) == wanted
        frozen = frozenset([("images", "encoder"), params.LANGUAGE])
        assert params.held(options.preset, lay, stages[rank], frozen) == (projector, 0, 0)

    @pytest.mark.parametrize("replicas", [1, 3, 8])
    def test_are_padded_as_in_megatrons_buffers(self, replicas):
        sizes = [1, 63, 64, 65, 1000, 4096]
        parameters = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
        buffer = DistributedOptimizer._compute_per_buffer_param_layout(
            parameters, None, replicas, DistributedDataParallelConfig()
        )
        assert params.padded(params.aligned(sizes), replicas) == buffer.bucket_indices[-1][1]


@pytest.mark.parametrize(
    "stage, pp, vpp, microbatches, most",
    [(0, 4, 1, 8, 4), (3, 4, 1, 8, 1), (0, 4, 1, 2, 2), (0, 1, 1, 8, 1), (0, 2, 2, 8, 5)],
)
def test_activations_are_of_the_microbatches_in_flight(stage, pp, vpp, microbatches, most):
    """With virtual stages they are the warm-up's 2·(pp - 1) + (vpp - 1)·pp, and one more."""
    layout = Layout(dp=1, etp=1, pp=pp, vpp=vpp)
    assert most_in_flight(stage, layout, microbatches, (1.0,) * vpp) == most


class TestCommunication:
    @pytest.mark.parametrize(
        "language, world, rank, per_node",
        [
            ("tp=2,cp=4,pp=4,ep=8,etp=1", 4096, 2777, 8),
            ("tp=4,cp=2,pp=2,ep=4", 512, 300, 8),
            ("ep=8", 16, 9, 4),
        ],
    )
    def test_groups_are_those_that_one_rank_of_thousands_makes(
        self, language, world, rank, per_node
    ):
        layouts = plan_of("tp=4", language, world).layouts
        expected = groups_of(layouts.language, per_node)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            encoder, module = make_modules(placed(find_preset("tiny"), layouts), "fake").values()
            made = {name: getattr(module.groups, name) for name in expected}
            made["encoder dp"] = encoder.groups.dp
            found = {name: dist.get_process_group_ranks(group) for name, group in made.items()}
            for each in (encoder, module):
                each.grid.destroy()
        finally:
            dist.destroy_process_group()
        expected = expected | {"encoder dp": replicas_of(layouts, per_node)[0]}
        for name, ranks in found.items():
            assert expected[name] == Group(len(ranks), len({r // per_node for r in ranks})), name

    def test_collectives_take_the_slowest_links(self):
        machine = replace(H200, node_latency=0.0, network_latency=0.0)
        node, network = (machine.bandwidth(leaves_node) for leaves_node in (False, True))
        inside, across = Group(8, 1), Group(8, 8)
        assert machine.ring(inside, 8.0) == pytest.approx(7 / node)
        assert machine.ring(across, 8.0) == pytest.approx(7 / network)
        assert machine.all_to_all(across, 8.0) == pytest.approx(7 / network)
        eight_adapters = min(node, 8 * network)
        assert machine.ring(Group(16, 2), 16.0) == pytest.approx(15 / eight_adapters)
        assert machine.all_reduce(Group(16, 2), 16.0) == pytest.approx(30 / eight_adapters)
        steps = replace(H200, node_latency=1.0, network_latency=10.0)  # up a tree, and down
        for group, seconds in ((Group(1, 1), 0), (Group(8, 1), 6), (Group(32, 4), 46)):
            assert steps.all_reduce(group) == pytest.approx(seconds)

    @pytest.mark.parametrize(
        "language, world",
        [("cp=2,pp=2", 8), ("dp=8", 8), ("tp=2,cp=2", 8), ("tp=2,cp=4,pp=4", 4096)],
    )
    def test_the_bridge_moves_what_its_own_plan_moves(self, language, world):
        plan = plan_of("tp=1", language, world)
        rows = sum(received(plan.layouts)) * plan.layouts.batch.global_size
        rows *= plan.inputs[0].mean * plan.preset.images.tokens_per_tile
        machine = replace(H200, node_latency=0.0, gpus_per_node=world)
        row = plan.preset.language.hidden_size * machine.precision
        most = max(rows) * row / machine.bandwidth(leaves_node=False)
        # The most of both ways may be on two ranks.
        assert 0.99 * most <= bridge_seconds(plan, machine) <= 1.5 * most

    def test_the_bridge_moves_what_the_documentation_says(self):
        """docs/reviewer/pipeline.md: b·max(0, 1/L − 1/E), b·(1/E − min(1/E, 1/L)/cp), b/E."""
        forward, backward = received(plan_of("dp=8", "cp=2,pp=2,dp=2", 8).layouts).tolist()
        assert forward == [1 / 2 - 1 / 8] * 4 + [0] * 4
        assert backward == [1 / 8 - 1 / 8 / 2] * 4 + [1 / 8] * 4


def received(layouts) -> np.ndarray:
    """Return the share of a batch's rows that each rank gets from others over the bridge, both
    ways: float64 [2, ranks]. A row's gradient is on the CP rank that owns its token."""
    topology = bridge_topology(*(make_grid(lay, "none") for lay in layouts.modules))
    shares = np.zeros((2, layouts.language.size))
    for way, share in enumerate(shares):
        for block in topology.blocks:
            crossing = plan_block(topology, block)[way]
            own = np.arange(len(block))[:, None, None]
            moved = (crossing.giver != NOBODY) & (crossing.giver != own)
            share[list(block)] = moved.sum(axis=(1, 2)) / crossing.owners / topology.atoms
    return shares


def unit_work(share, pp, vpp, number, module="language", **how) -> Work:
    """Return the work of equal stages, whose step without waiting takes 1, ``share`` encoding."""
    stages = [Stage(module, str(stage), 1) for stage in range(pp)]
    chunk = Cost(language=(1 - share) / number / vpp)
    at_once = how.get("at_once", number if pp > 1 else 1)
    encoder = Cost(encoder=share * at_once / number)
    return Work(stages, (chunk,) * pp * vpp, number, encoder, **{"at_once": at_once} | how)


class TestSchedule:
    @pytest.mark.parametrize(
        "share, module", [(0.2, "language"), (0.5, "language"), (0, "encoder")]
    )
    @pytest.mark.parametrize(
        "pp, vpp, number", [(1, 1, 3), (2, 1, 1), (4, 1, 6), (8, 1, 16), (4, 2, 8)]
    )
    def test_takes_what_the_formula_says(self, pp, vpp, number, share, module):
        """Non-colocated modules are one pipeline, whose encoder has stages of its own."""
        spans = timeline(unit_work(share, pp, vpp, number, module))
        expected = share + (1 - share) * (1 + (pp - 1) / (number * vpp))
        assert max(line[-1][2] for line in spans) == pytest.approx(expected)
        for line in spans:
            assert sum(end - begin for _, begin, end in line) == pytest.approx(1)
            assert all(a[2] <= b[1] + 1e-12 for a, b in zip(line, line[1:], strict=False))


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
        exact = step_time(plan, H200)
        assert sum(exact.parts.values()) == pytest.approx(exact.seconds, rel=1e-6)
        assert estimate(plan, H200) == pytest.approx(exact.seconds, rel=0.05)

    def test_of_equal_stages_has_the_bubble_of_1f1b(self):
        machine = replace(GRAPHS, overhead=GRAPHS.overhead | {"M": 1.0, "E": 1.0, "*": 1.0})
        plan = plan_of("dp=4", "pp=4", 4)  # of 8 layers, 2 a stage
        found = step_time(plan, replace(machine, node_latency=0.0))
        assert found.parts["bubble"] == pytest.approx(3 * 2.0, rel=0.01)


def test_tiles_vary_between_ranks_of_a_non_colocated_encoder_only():
    assert Inputs.parse("1,3") == Inputs(2.0, 1.0) and Inputs.parse("4:0.2") == Inputs(4.0)
    apart = plan_of("dp=4", "dp=4", 8, placement="non-colocated", micro=4)
    uneven = replace(apart, inputs=(Inputs(2.0, 1.0),))
    colocated = replace(plan_of("dp=8", "dp=8", 8, micro=4), inputs=(Inputs(2.0, 1.0),))
    most = [plan.most_inputs(*plan.encoders[0]) for plan in (apart, colocated, uneven)]
    assert most[0] == most[1] == 8.0 < most[2]
