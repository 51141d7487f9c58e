# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The reference ops of recurrent layers against their recurrences, and against PyTorch.

Tolerances: fp64 1e-10 absolute on values of order 1 (rounding of 100 terms is below 1e-12);
fp32 1e-5 relative to the largest value, the rounding of the running sum of log decays, whose size
stays below 100 at the step sizes that Mamba layers start from.
"""

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ssm.ops.reference import (
    RMSNormGated,
    causal_conv1d_fn,
    chunk_gated_delta_rule,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
)
from megatron.core.ssm.ops.reference.stand_in import stand_in_for
from tests.unit_tests.ssm.ops.reference.naive_ops import (
    conv_of_each_sample,
    naive_gated_delta_rule,
    naive_ssd,
)

FP64_ATOL, FP32_RTOL = 1e-10, 1e-5
BATCH, LENGTH, HEADS, WIDTH, GROUPS, STATE = 2, 37, 6, 3, 2, 5
LENGTHS = [3, 5, 1, 20, 8]
"""Sequences that end inside a chunk, on a chunk boundary, after one token, and span several."""

Inputs = dict[str, torch.Tensor]


def numbers() -> Callable[..., torch.Tensor]:
    """Draws normal numbers in fp64, the same ones each time."""
    generator = torch.Generator().manual_seed(1234)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def scan_inputs(length=LENGTH) -> Inputs:
    """Inputs of order 1; decays as in a newly made Mamba-2 layer: dt 0.001 to 0.1, A -16 to -1."""
    normal = numbers()
    return {
        "x": normal(BATCH, length, HEADS, WIDTH),
        "dt": (normal(BATCH, length, HEADS) * 1.5 - 4.5).clamp(-7, -2.2),
        "A": -1 - 15 * torch.special.ndtr(normal(HEADS)),
        "B": normal(BATCH, length, GROUPS, STATE),
        "C": normal(BATCH, length, GROUPS, STATE),
        "D": normal(HEADS),
        "initial_states": normal(BATCH, HEADS, WIDTH, STATE),
    }


def rule_inputs(length=LENGTH, batch=BATCH) -> Inputs:
    """Unit keys, as after the norm of the layer; decays of 0.5 to 1 a token; beta 0 to 1."""
    normal, heads, width, state = numbers(), 3, 5, 4
    return {
        "q": F.normalize(normal(batch, length, heads, state), dim=-1),
        "k": F.normalize(normal(batch, length, heads, state), dim=-1),
        "v": normal(batch, length, heads, width),
        "g": -0.7 * torch.special.ndtr(normal(batch, length, heads)),
        "beta": normal(batch, length, heads).sigmoid(),
        "initial_state": normal(batch, heads, state, width),
    }


def scan(inputs: Inputs, chunk_size: int, seq_idx=None, **options):
    """Outputs and the last state."""
    return mamba_chunk_scan_combined(
        **inputs,
        chunk_size=chunk_size,
        dt_softplus=True,
        return_final_states=True,
        seq_idx=seq_idx,
        **options,
    )


def rule(inputs: Inputs, chunk_size: int, seq_idx=None):
    return chunk_gated_delta_rule(
        **inputs, seq_idx=seq_idx, chunk_size=chunk_size, output_final_state=True
    )


def naive_scan(inputs: Inputs, seq_idx=None):
    return naive_ssd(**(inputs | {"dt": F.softplus(inputs["dt"])}), seq_idx=seq_idx)


def naive_rule(inputs: Inputs, seq_idx=None):
    return naive_gated_delta_rule(**inputs, scale=inputs["q"].shape[-1] ** -0.5, seq_idx=seq_idx)


class Op(NamedTuple):
    """A chunked op, its recurrence, its inputs, and the name of the state among them."""

    run: Callable
    recurrence: Callable
    inputs: Callable
    state: str


OPS = {
    "mamba": Op(scan, naive_scan, scan_inputs, "initial_states"),
    "delta": Op(rule, naive_rule, rule_inputs, "initial_state"),
}


def packed_rows() -> torch.Tensor:
    """Two rows packed differently, `[BATCH, LENGTH]`."""
    row = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return torch.stack([row, row // 2])


def assert_equal(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=FP64_ATOL)


@pytest.fixture(params=OPS)
def op(request) -> Op:
    return OPS[request.param]


class TestChunkedOps:
    @pytest.mark.parametrize("chunk_size", [1, 8, 16, 37, 64])
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("with_state", [False, True])
    def test_fp64_equals_the_recurrence(self, op, chunk_size, packed, with_state):
        inputs, seq_idx = op.inputs(), packed_rows() if packed else None
        if not with_state:
            inputs[op.state] = None
        assert_equal(op.run(inputs, chunk_size, seq_idx), op.recurrence(inputs, seq_idx))

    @pytest.mark.parametrize("chunk_size", [16, 64, 128])
    def test_fp32_is_close_to_the_fp64_recurrence(self, op, chunk_size):
        inputs = op.inputs(length=300)
        found = op.run({k: v.float() for k, v in inputs.items()}, chunk_size)
        for a, b in zip(found, op.recurrence(inputs), strict=True):
            assert a.dtype == torch.float32
            assert (a.double() - b).abs().max() / b.abs().max() <= FP32_RTOL

    def test_gradients_equal_those_of_the_recurrence_across_chunks(self, op):
        found = []
        for run in (
            lambda i: op.run(i, 8, packed_rows()),
            lambda i: op.recurrence(i, packed_rows()),
        ):
            inputs = {k: v.requires_grad_() for k, v in op.inputs().items()}
            y, state = run(inputs)
            (y.sin().sum() + state.cos().sum()).backward()
            found.append([v.grad for v in inputs.values()])
        assert_equal(*found)


class TestChunkScan:
    def test_bf16_inputs_are_computed_in_fp32(self):
        inputs = {k: v.bfloat16() for k, v in scan_inputs().items()}
        y, state = scan(inputs, 16)
        expected, _ = scan({k: v.float() for k, v in inputs.items()}, 16)
        assert state.dtype == torch.float32
        assert torch.equal(y, expected.bfloat16())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_long_steep_decay_stays_finite(self, dtype):
        """A running sum of -2000 a token: its exponential overflows one way, vanishes the other."""
        inputs = {k: v.to(dtype) for k, v in scan_inputs(length=64).items()}
        inputs["dt"] = torch.full_like(inputs["dt"], 125.0).requires_grad_()
        inputs["A"] = torch.full_like(inputs["A"], -16.0).requires_grad_()
        y, _ = mamba_chunk_scan_combined(**inputs, chunk_size=16, return_final_states=True)
        y.sum().backward()
        for value in (y, inputs["dt"].grad, inputs["A"].grad):
            assert value.isfinite().all()


class TestChunkGatedDeltaRule:
    def test_boundaries_say_what_an_index_says(self):
        """Tokens after the last boundary are one more sequence. Their states are refused."""
        inputs = rule_inputs(batch=1)
        del inputs["initial_state"]
        boundaries = torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)
        o, state = chunk_gated_delta_rule(**inputs, cu_seqlens=boundaries, chunk_size=8)
        assert state is None
        assert_equal([o], naive_rule(inputs, packed_rows()[:1])[:1])
        with pytest.raises(ValueError, match="seq_idx"):
            chunk_gated_delta_rule(**rule_inputs(batch=1), cu_seqlens=boundaries)

    def test_normalises_queries_and_keys_when_asked(self):
        inputs = rule_inputs()
        scaled = inputs | {"q": inputs["q"] * 3, "k": inputs["k"] * 5}
        o, _ = chunk_gated_delta_rule(**scaled, use_qk_l2norm_in_kernel=True, scale=1.0)
        expected, _ = naive_gated_delta_rule(**inputs, scale=1.0)
        # The norm adds 1e-6 to the squared length, here 9 and 25.
        torch.testing.assert_close(o, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("left_out", [(), ("bias", "initial_states")])
def test_a_causal_convolution_equals_one_of_each_sample(packed, left_out):
    """The memory order of the input is kept."""
    shapes = {"x": (2, LENGTH, 5), "weight": (5, 4), "bias": (5,), "initial_states": (2, 5, 3)}
    normal = numbers()
    inputs = {name: normal(*s) for name, s in shapes.items() if name not in left_out}
    inputs["x"] = inputs["x"].transpose(1, 2)
    inputs["seq_idx"] = packed_rows() if packed else None
    y = causal_conv1d_fn(**inputs, activation="silu")
    assert_equal([y], [F.silu(conv_of_each_sample(**inputs))])
    assert left_out == () or y.transpose(1, 2).is_contiguous()
    with pytest.raises(ValueError, match="gelu"):
        causal_conv1d_fn(**inputs, activation="gelu")


@pytest.mark.parametrize("size", [12, 4])
@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_gated_norm_equals_one_of_each_group(size, norm_before_gate, gated):
    x, z = torch.randn(2, 3, 5, 12, dtype=torch.float64)
    norm = RMSNormGated(12, 1e-5, size, norm_before_gate, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    before, after = (1, F.silu(z)) if norm_before_gate else (F.silu(z), 1)
    if not gated:
        z, before, after = None, 1, 1
    grouped = F.rms_norm((x * before).unflatten(-1, (-1, size)), (size,), eps=1e-5)
    assert_equal([norm(x, z)], [grouped.flatten(-2) * norm.weight * after])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("per_feature", [False, True])
def test_the_split_scan_equals_convolution_recurrence_and_gate_in_turn(packed, per_feature):
    inner, states, normal = HEADS * WIDTH, GROUPS * STATE, numbers()
    projected = normal(BATCH, LENGTH, 2 * inner + 2 * states + HEADS)
    weight, bias = normal(inner + 2 * states, 4), normal(inner + 2 * states)
    dt_bias, A = normal(HEADS), -normal(HEADS).abs() - 1
    D = normal(HEADS, WIDTH) if per_feature else normal(HEADS)
    seq_idx = packed_rows() if packed else None
    y = mamba_split_conv1d_scan_combined(
        projected, weight, bias, dt_bias, A, D, 16, seq_idx=seq_idx, headdim=WIDTH, ngroups=GROUPS
    )
    z, xBC, dt = projected.split([inner, inner + 2 * states, HEADS], dim=-1)
    xBC = F.silu(conv_of_each_sample(xBC.transpose(1, 2), weight, bias, seq_idx)).transpose(1, 2)
    x, B, C = xBC.split([inner, states, states], dim=-1)
    B, C = (part.unflatten(-1, (GROUPS, STATE)) for part in (B, C))
    x, dt = x.unflatten(-1, (HEADS, WIDTH)), F.softplus(dt + dt_bias)
    expected, _ = naive_ssd(x, dt, A, B, C, D, seq_idx=seq_idx)
    assert_equal([y], [expected.flatten(-2) * F.silu(z)])


def test_no_broken_installation_is_replaced(monkeypatch):
    stand_in_for.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ImportError, match="mamba_ssm is installed"):
        stand_in_for("mamba_ssm", "Mamba layers")
