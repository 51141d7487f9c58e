# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The Mamba mixer that passes states between CP ranks, against the same mixer on whole samples."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.context_parallel_layout import PaddedLengths, plan_recurrence
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.ssm.state_passing.layer_tokens import tokens_are_contiguous
from megatron.core.ssm.state_passing.mamba import reference_scan
from tests.unit_tests.ssm.mixers import HIDDEN, call, make_mixer
from tests.unit_tests.ssm.whole_and_sharded import (
    EqualsOneRank,
    Pair,
    Ranks,
    assert_close,
    cases,
    random_rows,
)
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

HEADS, HEADDIM, GROUPS, SEQUENCE, BATCH = 6, 16, 2, 48, 2
# Odd, empty, below 2·cp, and longer than a chunk of the scan and than a shard.
PACKED = (5, 0, 1, 39, 9)


# No number of ranks but 2 divides the heads and groups: the head-parallel path takes none of them.
CASES = cases(
    (2, Ranks(cp=2), "zigzag", torch.float32),
    (2, Ranks(cp=2), "contiguous", torch.float64),
    (4, Ranks(cp=3), "zigzag", torch.float32),
    (4, Ranks(cp=4), "contiguous", torch.float32),
    (4, Ranks(cp=4), "zigzag", torch.float64),
    (4, Ranks(cp=2, tp=2), "zigzag", torch.float32),
    (4, Ranks(cp=2, tp=2), "contiguous", torch.float32),
    (8, Ranks(cp=5), "zigzag", torch.float32),
    (8, Ranks(cp=8), "contiguous", torch.float64),
)


def mixer_of(groups, passes_states: bool, layout: str, dtype: torch.dtype) -> MambaMixer:
    mixer = make_mixer(
        groups,
        dtype=dtype,
        mamba_num_heads=HEADS,
        mamba_head_dim=HEADDIM,
        mamba_num_groups=GROUPS,
        linear_context_parallel="state-passing" if passes_states else "head-parallel",
    )
    if layout == "contiguous":
        tokens_are_contiguous(mixer)
    with torch.no_grad():
        # Decays slow enough that a state outlives a shard.
        mixer.A_log.sub_(3)
    return mixer


@pytest.fixture
def pair(request):
    """The mixers."""
    ranks, layout, dtype = request.param

    def make(groups, shards):
        return mixer_of(groups, shards, layout, dtype)

    yield from Pair(ranks, make, layout, dtype).while_used()


@pytest.mark.parametrize("pair", CASES, indirect=True)
class TestMixerThatPassesStates(EqualsOneRank):
    call = staticmethod(call)
    hidden, sequence, batch, packed = HIDDEN, SEQUENCE, BATCH, PACKED


@pytest.mark.parametrize("pair", cases((4, Ranks(cp=3), "zigzag", torch.float32)), indirect=True)
@pytest.mark.skipif(HAVE_CUDA, reason="transformers takes the same kernels where it finds them")
class TestAgainstTransformers:
    def test_equals_the_mamba_2_of_transformers(self, pair):
        """To 1e-5 in fp32: the other implementation adds the same terms in another order."""
        if not pair:
            return
        modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
        config = modeling.Mamba2Config(
            num_heads=HEADS,
            head_dim=HEADDIM,
            hidden_size=HIDDEN,
            state_size=8,
            expand=HEADS * HEADDIM // HIDDEN,
            n_groups=GROUPS,
            chunk_size=16,
            num_hidden_layers=1,
        )
        other = modeling.Mamba2Mixer(config, layer_idx=0).eval().to(Utils.device)
        weights = pair.whole.state_dict()
        weights = {name.replace("conv1d_", "conv1d."): weights[name] for name in weights}
        assert not other.load_state_dict(weights, strict=False).missing_keys
        hidden = random_rows(SEQUENCE, BATCH, HIDDEN, seed=1)
        lengths = PaddedLengths((SEQUENCE,), (SEQUENCE,))
        shard = pair.layout(lengths).shard(hidden, pair.rank)
        with torch.no_grad():
            expected = other(hidden.transpose(0, 1)).transpose(0, 1)
            found = call(pair.sharded, shard, None)
        expected = pair.layout(lengths).shard(expected, pair.rank)
        assert_close(found, expected, 1e-5, "output")


def scan_inputs(tokens: int) -> dict[str, torch.Tensor]:
    """fp64 inputs of a whole batch; chunks of 4 tokens, decays that outlive several shards."""
    generator = torch.Generator().manual_seed(3)
    heads, headdim, groups, state = 4, 3, 2, 5
    channels = heads * headdim + 2 * groups * state

    def normal(*shape):
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(Utils.device)

    return {
        "projected": normal(1, tokens, heads * headdim + channels + heads),
        "conv_weight": normal(channels, 4),
        "conv_bias": normal(channels),
        "dt_bias": normal(heads) - 2,
        "A": -normal(heads).abs() / 4,
        "D": normal(heads),
    }


@requires_world_size(4)
class TestScan:
    """The reference scan in fp64, to 1e-10, where nothing goes through fp32."""

    @pytest.mark.parametrize(
        "lengths",
        # A sample over three ranks; one that ends where a shard does; shards below the window's
        # reach, whose halo comes from several ranks.
        [(24,), (5, 1, 0, 17, 1), (6, 3, 3, 12), (1, 7), (8,)],
        ids=str,
    )
    def test_output_and_every_gradient_equal_one_rank(self, lengths):
        Utils.initialize_distributed()
        group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
        lengths = PaddedLengths(lengths, lengths)
        weight = torch.randn(1, lengths.total, 12, dtype=torch.float64, generator=seeded())
        weight = weight.to(Utils.device)

        def run(inputs, plan, weight, group):
            leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
            y = reference_scan(*leaves.values(), 4, 3, 2, plan, group)
            (y * weight).sum().backward()
            return y.detach(), {name: leaf.grad for name, leaf in leaves.items()}

        inputs = scan_inputs(lengths.total)
        device = Utils.device
        expected, expected_grads = run(
            inputs, plan_recurrence(lengths, 1, 0, device), weight, group=None
        )
        plan = plan_recurrence(lengths, size, rank, device)
        own = slice(rank * plan.shard_size, (rank + 1) * plan.shard_size)
        shard = inputs | {"projected": inputs["projected"][:, own]}
        found, found_grads = run(shard, plan, weight[:, own], group)
        assert_close(found, expected[:, own], 1e-10, "output")
        projected = found_grads.pop("projected")
        assert_close(projected, expected_grads["projected"][:, own], 1e-10, "projected")
        for name, grad in found_grads.items():
            dist.all_reduce(grad)
            assert_close(grad, expected_grads[name], 1e-10, name)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
