# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The gated delta net over CP ranks, both ways, against the same layer on whole samples."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.head_parallel_limits import check_gated_delta_net
from megatron.core.ssm.silu_gated_delta_net import SiluGatedDeltaNet
from megatron.core.ssm.state_passing.gated_delta.layer import reference_rule
from megatron.core.ssm.state_passing.layer_tokens import tokens_are_contiguous
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.token_layout import PaddedLengths, plan_recurrence
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.sequence_parallel_norm import SequenceParallelNorm
from tests.unit_tests.ssm.whole_and_sharded import (
    EqualsOneRank,
    Pair,
    Ranks,
    assert_close,
    cases,
    random_rows,
)
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

HIDDEN, SEQUENCE, BATCH = 32, 48, 2
# Odd, empty, below 2·cp, and longer than a shard.
PACKED = (5, 0, 1, 139, 9)


def make_layer(
    groups, mode: str, layout: str, dtype: torch.dtype, heads: int, **options
) -> GatedDeltaNet:
    model_parallel_cuda_manual_seed(
        7, tp_rank=groups.tp.rank(), ep_rank=0, etp_rank=groups.tp.rank()
    )
    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        linear_num_key_heads=heads,
        linear_num_value_heads=2 * heads,
        use_cpu_initialization=True,
        params_dtype=dtype,
        linear_cp_mode=mode,
        **options,
    )
    submodules = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=SequenceParallelNorm, out_proj=RowParallelLinear
    )
    layer = SiluGatedDeltaNet(config, submodules, layer_number=1, pg_collection=groups)
    with torch.no_grad():
        # Heads must differ in every parameter: those that start out as ones would hide a mix-up.
        generator = torch.Generator().manual_seed(groups.tp.rank())
        noise = torch.rand(2, *layer.dt_bias.shape, generator=generator).to(layer.dt_bias.device)
        layer.dt_bias.add_(noise[0])
        # Decays slow enough that a state outlives a shard.
        layer.A_log.copy_(noise[1] - 4)
    if layout == "contiguous":
        tokens_are_contiguous(layer)
    return layer.to(Utils.device, dtype)


@pytest.fixture
def pair(request):
    """The layers."""
    (ranks, layout, dtype), (mode, heads) = request.param, request.node.cls.mode
    options = request.node.cls.options

    def make(groups, shards):
        sharded = options if shards else {}
        return make_layer(groups, mode, layout, dtype, heads, **sharded)

    yield from Pair(ranks, make, layout, dtype).while_used()


def call(layer, hidden, packed_seq_params):
    return layer(hidden, attention_mask=None, packed_seq_params=packed_seq_params)[0]


class _EqualsOneRank(EqualsOneRank):
    call = staticmethod(call)
    options = {}
    hidden, sequence, batch, packed = HIDDEN, SEQUENCE, BATCH, PACKED


@pytest.mark.parametrize(
    "pair",
    # 2 key heads: no cp of 3 or more divides them.
    cases(
        (2, Ranks(cp=2), "zigzag", torch.float32),
        (2, Ranks(cp=2), "contiguous", torch.float64),
        (4, Ranks(cp=3), "contiguous", torch.float32),
        (4, Ranks(cp=4), "zigzag", torch.float64),
        (4, Ranks(cp=2, tp=2), "zigzag", torch.float32),
        (8, Ranks(cp=5), "zigzag", torch.float32),
        (8, Ranks(cp=8), "contiguous", torch.float64),
    ),
    indirect=True,
)
class TestStatePassing(_EqualsOneRank):
    mode = ("chunkwise", 2)

    def test_another_activation_is_refused(self, pair, monkeypatch):
        if pair:
            monkeypatch.setattr(pair.sharded, "activation", "gelu")
            with pytest.raises(ValueError, match="whose activation is silu, not gelu"):
                call(pair.sharded, random_rows(4, BATCH, HIDDEN, seed=1), None)


@pytest.mark.parametrize(
    "pair",
    cases(
        (2, Ranks(cp=2), "zigzag", torch.float32),
        (2, Ranks(cp=2), "contiguous", torch.float32),
    ),
    indirect=True,
)
class TestStatePassingThatComputesItsNormAgain(_EqualsOneRank):
    mode = ("chunkwise", 2)
    options = dict(
        recompute_granularity="selective",
        recompute_modules=["gdn_norm_out"],
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=1,
    )

    @pytest.fixture(autouse=True)
    def _copied_storage(self, monkeypatch):
        """Copy storages: upstream lets tensors share one by compiled code, which takes a minute."""

        def copy(output, computed):
            output.untyped_storage().resize_(computed.untyped_storage().nbytes())
            output.untyped_storage().copy_(computed.untyped_storage())

        monkeypatch.setattr(random, "_get_share_storage", lambda: copy)

    def test_what_was_discarded_is_computed_again(self, pair, monkeypatch):
        if pair:
            computed = []
            norm = pair.sharded._apply_gated_norm
            monkeypatch.setattr(
                pair.sharded, "_apply_gated_norm", lambda *a: (computed.append(1), norm(*a))[1]
            )
            hidden = random_rows(8, BATCH, HIDDEN, seed=1).requires_grad_()
            out = call(pair.sharded, hidden, None)
            assert len(computed) == 1
            out.sum().backward()
            assert len(computed) == 2


@pytest.mark.parametrize(
    "pair",
    cases(
        (2, Ranks(cp=2), "zigzag", torch.float32),
        (4, Ranks(cp=4), "zigzag", torch.float32),
        (4, Ranks(cp=2, tp=2), "zigzag", torch.float32),
    ),
    indirect=True,
)
class TestHeadParallel(_EqualsOneRank):
    mode = ("headwise", 4)

    def test_a_length_that_does_not_halve_is_refused(self, pair):
        """cp divides the length, so ranks have equally many tokens and nothing else notices."""
        if pair:
            hidden = random_rows(5, BATCH, HIDDEN, seed=1)
            with pytest.raises(ValueError, match=rf"multiples of {2 * pair.size}, got"):
                call(pair.sharded, hidden, None)

    def test_kernels_are_told_of_no_empty_sample(self, pair, monkeypatch):
        """fla's kernels count samples by their first chunks, and empty samples have none."""
        if pair:
            told, rule = [], pair.sharded.gated_delta_rule

            def noting(*args, cu_seqlens, **options):
                told.append(cu_seqlens.tolist())
                return rule(*args, cu_seqlens=cu_seqlens, **options)

            monkeypatch.setattr(pair.sharded, "gated_delta_rule", noting)
            unit = 2 * pair.size
            lengths = PaddedLengths((0, unit, 0, 2 * unit, 0), (0, unit, 0, 2 * unit, 0))
            hidden = random_rows(6, 1, HIDDEN, seed=1)
            call(pair.sharded, hidden, lengths.packed_seq_params(Utils.device))
            assert told == [[0, unit, 3 * unit]]

    def test_packed_lengths_that_do_not_halve_are_refused(self, pair):
        if pair:
            lengths = PaddedLengths((pair.size, 3 * pair.size), (pair.size, 3 * pair.size))
            hidden = random_rows(4, 1, HIDDEN, seed=1)
            with pytest.raises(ValueError, match=rf"multiples of {2 * pair.size}, got"):
                call(pair.sharded, hidden, lengths.packed_seq_params(Utils.device))


class TestLimits:
    def test_heads_that_do_not_divide_are_refused_with_what_fits(self):
        with pytest.raises(ValueError) as refusal:
            check_gated_delta_net(key_heads=16, value_heads=32, tp_size=2, cp_size=3)
        assert str(refusal.value) == (
            "a gated delta net of 16 key and 32 value heads cannot be spread over tp=2, cp=3: "
            "tp·cp = 6 must divide both; cp sizes that fit with tp=2: 1, 2, 4, 8; "
            "state passing takes any"
        )


def rule_inputs(
    tokens: int, rows: int = 1, size: int = 4, width: int = 5
) -> dict[str, torch.Tensor]:
    """fp64 inputs of a whole batch; decays that outlive several shards."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        drawn = torch.randn(rows, tokens, 3, *shape, generator=generator, dtype=torch.float64)
        return drawn.to(Utils.device)

    unit = torch.nn.functional.normalize
    return {
        "query": unit(normal(size), dim=-1),
        "key": unit(normal(size), dim=-1),
        "value": normal(width),
        "g": -normal().abs() / 8,
        "beta": normal().sigmoid(),
    }


@requires_world_size(4)
class TestRule:
    """The rule over four ranks, against other implementations."""

    @pytest.mark.skipif(HAVE_CUDA, reason="transformers takes fla's kernels where it finds them")
    def test_equals_the_gated_delta_rule_of_transformers(self):
        """The tolerance is 1e-5, because transformers computes in fp32."""
        modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
        inputs = rule_inputs(280)
        expected, _ = modeling.torch_chunk_gated_delta_rule(**inputs)
        (found, *_), _, _ = self._run((280,), inputs)
        own = slice(dist.get_rank() * 70, (dist.get_rank() + 1) * 70)
        assert_close(found, expected[:, own], 1e-5, "output")

    @pytest.mark.skipif(not HAVE_CUDA, reason="the kernels need a GPU")
    @pytest.mark.parametrize(("lengths", "rows"), [((280,), 2), ((70, 1, 209), 1), ((560,), 1)])
    def test_kernels_equal_one_rank(self, lengths, rows):
        """In bf16, for heads of the published width."""
        kernels = pytest.importorskip("megatron.core.ssm.state_passing.gated_delta.kernels")
        inputs = rule_inputs(sum(lengths), rows, size=128, width=128)
        inputs = {
            name: t.to(torch.float32 if name == "g" else torch.bfloat16)
            for name, t in inputs.items()
        }
        found, expected, names = self._run(lengths, inputs, kernels.kernel_rule)
        for name, a, b in zip(names, found, expected, strict=True):
            assert_close(a.float(), b.float(), 2e-2, name)

    def _run(self, lengths, inputs, rule=reference_rule):
        """Output and gradients of this rank's tokens: over four ranks, and the reference on one."""
        Utils.initialize_distributed()
        size, rank = dist.get_world_size(), dist.get_rank()
        lengths = PaddedLengths(lengths, lengths)
        generator = torch.Generator().manual_seed(0)
        value = inputs["value"]
        weight = torch.randn(value.shape, dtype=torch.float64, generator=generator).to(value)
        results = []
        for rule_here, ranks, at in ((rule, size, rank), (reference_rule, 1, 0)):
            plan = plan_recurrence(lengths, ranks, at, Utils.device)
            own = slice(at * plan.shard_size, (at + 1) * plan.shard_size)
            leaves = [t[:, own].clone().requires_grad_() for t in inputs.values()]
            o = rule_here(*leaves, plan, dist.group.WORLD)
            (o * weight[:, own]).sum().backward()
            results.append([o.detach(), *(leaf.grad for leaf in leaves)])
        own = slice(rank * lengths.total // size, (rank + 1) * lengths.total // size)
        found, whole = results
        return found, [t[:, own] for t in whole], ["output", *inputs]
