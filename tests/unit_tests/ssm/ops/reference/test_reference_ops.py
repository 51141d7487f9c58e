# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The reference ops against the recurrences in `naive_ops`. No process group, no GPU.

Tolerances: fp64 1e-10 absolute on values of order 1 (rounding of 100 terms is below 1e-12);
fp32 1e-5 relative to the largest value, the rounding of the running sum of log decays, whose size
stays below 100 at the step sizes that Mamba layers start from.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ssm.ops.reference import (
    RMSNormGated,
    causal_conv1d_fn,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
    rms_norm_gated,
    seq_idx_from_cu_seqlens,
)
from tests.unit_tests.ssm.ops.reference.naive_ops import (
    naive_causal_conv1d,
    naive_rms_norm_gated,
    naive_ssd,
)

FP64_ATOL = 1e-10
FP32_RTOL = 1e-5
BATCH, LENGTH, HEADS, HEADDIM, GROUPS, STATE = 2, 37, 6, 3, 2, 5
CHUNK_SIZES = [1, 8, 16, 37, 64]
# Sequences that end inside a chunk, on a chunk boundary, after one token, and span several chunks.
PACKED_ROW = [0] * 3 + [1] * 5 + [2] * 1 + [3] * 20 + [4] * 8


def scan_inputs(
    batch=BATCH, length=LENGTH, heads=HEADS, headdim=HEADDIM, groups=GROUPS, state=STATE
) -> dict[str, torch.Tensor]:
    """Inputs of order 1; decays as in a newly made Mamba-2 layer: dt 0.001 to 0.1, A -16 to -1."""
    generator = torch.Generator().manual_seed(1234)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "x": normal(batch, length, heads, headdim),
        "dt": (normal(batch, length, heads) * 1.5 - 4.5).clamp(-7, -2.2),
        "A": -1 - 15 * torch.rand(heads, generator=generator, dtype=torch.float64),
        "B": normal(batch, length, groups, state),
        "C": normal(batch, length, groups, state),
        "D": normal(heads),
        "initial_states": normal(batch, heads, headdim, state),
    }


def packed_rows() -> torch.Tensor:
    """Two rows packed differently, `[BATCH, LENGTH]`."""
    return torch.tensor([PACKED_ROW, sorted(i // 2 for i in PACKED_ROW)])


def scan(inputs, chunk_size, **options):
    return mamba_chunk_scan_combined(
        **inputs, chunk_size=chunk_size, dt_softplus=True, return_final_states=True, **options
    )


def oracle(inputs, seq_idx=None):
    return naive_ssd(**(inputs | {"dt": F.softplus(inputs["dt"])}), seq_idx=seq_idx)


class TestChunkScan:
    @pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("with_initial_states", [False, True])
    def test_fp64_equals_recurrence(self, chunk_size, packed, with_initial_states):
        inputs = scan_inputs()
        if not with_initial_states:
            inputs["initial_states"] = None
        seq_idx = packed_rows() if packed else None
        y, state = scan(inputs, chunk_size, seq_idx=seq_idx)
        expected_y, expected_state = oracle(inputs, seq_idx)
        torch.testing.assert_close(y, expected_y, rtol=0, atol=FP64_ATOL)
        torch.testing.assert_close(state, expected_state, rtol=0, atol=FP64_ATOL)

    @pytest.mark.parametrize("chunk_size", [16, 128])
    def test_fp32_is_close_to_fp64_recurrence(self, chunk_size):
        inputs = scan_inputs(length=300)
        y, state = scan({k: v.float() for k, v in inputs.items()}, chunk_size)
        expected_y, expected_state = oracle(inputs)
        for got, expected in [(y, expected_y), (state, expected_state)]:
            assert got.dtype == torch.float32
            error = (got.double() - expected).abs().max() / expected.abs().max()
            assert error <= FP32_RTOL

    def test_bf16_inputs_are_computed_in_fp32(self):
        inputs = {k: v.bfloat16() for k, v in scan_inputs().items()}
        y, state = scan(inputs, 16)
        expected, _ = scan({k: v.float() for k, v in inputs.items()}, 16)
        assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(y, expected.bfloat16(), rtol=0, atol=0)

    @pytest.mark.parametrize("packed", [False, True])
    def test_gradients_of_every_input(self, packed):
        inputs = scan_inputs(batch=1, length=7, heads=2, headdim=2, groups=1, state=2)
        seq_idx = torch.tensor([[0, 0, 0, 1, 1, 1, 2]]) if packed else None
        names = list(inputs)
        leaves = [inputs[name].requires_grad_() for name in names]
        assert torch.autograd.gradcheck(
            lambda *values: scan(dict(zip(names, values, strict=True)), 3, seq_idx=seq_idx), leaves
        )

    def test_gradients_equal_those_of_recurrence_across_chunks(self):
        def gradients(run):
            inputs = {k: v.requires_grad_() for k, v in scan_inputs().items()}
            y, state = run(inputs)
            (y.sin().sum() + state.cos().sum()).backward()
            return [v.grad for v in inputs.values()]

        seq_idx = packed_rows()
        for got, expected in zip(
            gradients(lambda inputs: scan(inputs, 8, seq_idx=seq_idx)),
            gradients(lambda inputs: oracle(inputs, seq_idx)),
            strict=True,
        ):
            torch.testing.assert_close(got, expected, rtol=0, atol=FP64_ATOL)

    @pytest.mark.parametrize("chunk_size", [8, 16])
    def test_packed_row_equals_separate_sequences(self, chunk_size):
        inputs = scan_inputs(batch=1) | {"initial_states": None}
        y, state = scan(inputs, chunk_size, seq_idx=torch.tensor([PACKED_ROW]))
        start = 0
        for length in torch.tensor(PACKED_ROW).bincount().tolist():
            part = {
                k: v[:, start : start + length] if k in ("x", "dt", "B", "C") else v
                for k, v in inputs.items()
            }
            expected_y, expected_state = scan(part, chunk_size)
            torch.testing.assert_close(
                y[:, start : start + length], expected_y, rtol=0, atol=FP64_ATOL
            )
            start += length
        torch.testing.assert_close(state, expected_state, rtol=0, atol=FP64_ATOL)

    @pytest.mark.parametrize("cut", [1, 16, 20, 36])
    def test_state_carries_one_half_into_the_other(self, cut):
        inputs = scan_inputs()
        expected_y, expected_state = scan(inputs, 8)
        halves = [
            {k: v[:, part] if k in ("x", "dt", "B", "C") else v for k, v in inputs.items()}
            for part in (slice(cut), slice(cut, None))
        ]
        first_y, state = scan(halves[0], 8)
        second_y, state = scan(halves[1] | {"initial_states": state}, 8)
        y = torch.cat([first_y, second_y], dim=1)
        torch.testing.assert_close(y, expected_y, rtol=0, atol=FP64_ATOL)
        torch.testing.assert_close(state, expected_state, rtol=0, atol=FP64_ATOL)

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

    def test_skip_weight_per_feature_gate_and_step_limits(self):
        inputs = scan_inputs()
        inputs["D"] = torch.randn(HEADS, HEADDIM, dtype=torch.float64)
        z, bias = torch.randn_like(inputs["x"]), torch.randn(HEADS, dtype=torch.float64)
        y, _ = scan(inputs, 16, z=z, dt_bias=bias, dt_limit=(0.01, 0.05))
        dt = F.softplus(inputs["dt"] + bias).clamp(0.01, 0.05)
        expected, _ = naive_ssd(**(inputs | {"dt": dt}))
        torch.testing.assert_close(y, expected * F.silu(z), rtol=0, atol=FP64_ATOL)


def conv_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1234)
    shapes = {"x": (2, 5, LENGTH), "weight": (5, 4), "bias": (5,), "initial_states": (2, 5, 3)}
    return {k: torch.randn(*s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}


class TestCausalConv1d:
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("left_out", [(), ("bias", "initial_states")])
    def test_equals_sliding_window(self, packed, left_out):
        inputs = {k: v for k, v in conv_inputs().items() if k not in left_out}
        seq_idx = packed_rows() if packed else None
        y, state = causal_conv1d_fn(
            **inputs, seq_idx=seq_idx, return_final_states=True, activation="silu"
        )
        expected_y, expected_state = naive_causal_conv1d(**inputs, seq_idx=seq_idx)
        torch.testing.assert_close(y, F.silu(expected_y), rtol=0, atol=FP64_ATOL)
        torch.testing.assert_close(state, expected_state, rtol=0, atol=FP64_ATOL)

    @pytest.mark.parametrize("packed", [False, True])
    def test_gradients_of_every_input(self, packed):
        inputs = conv_inputs()
        inputs["x"] = inputs["x"][..., :6]
        seq_idx = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]]) if packed else None
        leaves = [v.clone().requires_grad_() for v in inputs.values()]
        assert torch.autograd.gradcheck(
            lambda x, weight, bias, state: causal_conv1d_fn(
                x, weight, bias, seq_idx, state, return_final_states=True, activation="silu"
            ),
            leaves,
        )

    @pytest.mark.parametrize("cut", [1, 2, 20])
    def test_state_carries_one_half_into_the_other(self, cut):
        inputs = conv_inputs()
        expected = causal_conv1d_fn(**inputs)
        x = inputs.pop("x")
        first, state = causal_conv1d_fn(x[..., :cut], **inputs, return_final_states=True)
        second = causal_conv1d_fn(x[..., cut:], **(inputs | {"initial_states": state}))
        torch.testing.assert_close(
            torch.cat([first, second], dim=-1), expected, rtol=0, atol=FP64_ATOL
        )

    def test_memory_order_of_the_input_is_kept(self):
        inputs = conv_inputs()
        inputs["x"] = inputs["x"].transpose(1, 2).contiguous().transpose(1, 2)
        del inputs["initial_states"]
        assert causal_conv1d_fn(**inputs).transpose(1, 2).is_contiguous()

    def test_unknown_activation_is_refused(self):
        with pytest.raises(ValueError, match="gelu"):
            causal_conv1d_fn(**conv_inputs(), activation="gelu")


class TestGatedRMSNorm:
    @pytest.mark.parametrize("group_size", [None, 4])
    @pytest.mark.parametrize("norm_before_gate", [False, True])
    @pytest.mark.parametrize("gated", [False, True])
    def test_equals_group_by_group(self, group_size, norm_before_gate, gated):
        x, z = torch.randn(2, 3, 5, 12, dtype=torch.float64)
        norm = RMSNormGated(12, 1e-5, group_size, norm_before_gate, dtype=torch.float64)
        torch.nn.init.normal_(norm.weight)
        z = z if gated else None
        expected = naive_rms_norm_gated(x, norm.weight, z, 1e-5, group_size, norm_before_gate)
        torch.testing.assert_close(norm(x, z), expected, rtol=0, atol=FP64_ATOL)

    @pytest.mark.parametrize("norm_before_gate", [False, True])
    def test_gradients_of_every_input(self, norm_before_gate):
        leaves = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((2, 6), 6, (2, 6))]
        assert torch.autograd.gradcheck(
            lambda x, weight, z: rms_norm_gated(x, weight, z, 1e-5, 3, norm_before_gate), leaves
        )

    def test_group_size_that_does_not_divide_is_refused(self):
        with pytest.raises(ValueError, match="group_size 5"):
            RMSNormGated(12, group_size=5)


class TestSplitConvScan:
    @pytest.mark.parametrize("packed", [False, True])
    def test_equals_convolution_recurrence_and_gate_in_turn(self, packed):
        inner, states = HEADS * HEADDIM, GROUPS * STATE
        generator = torch.Generator().manual_seed(1234)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        projected = normal(BATCH, LENGTH, 2 * inner + 2 * states + HEADS)
        weight, bias = normal(inner + 2 * states, 4), normal(inner + 2 * states)
        dt_bias, A, D = normal(HEADS), -normal(HEADS).abs() - 1, normal(HEADS)
        seq_idx = packed_rows() if packed else None
        y = mamba_split_conv1d_scan_combined(
            projected, weight, bias, dt_bias, A, D, 16,
            seq_idx=seq_idx, headdim=HEADDIM, ngroups=GROUPS,
        )  # fmt: skip

        z, xBC, dt = projected.split([inner, inner + 2 * states, HEADS], dim=-1)
        xBC, _ = naive_causal_conv1d(xBC.transpose(1, 2), weight, bias, seq_idx)
        x, B, C = F.silu(xBC).transpose(1, 2).split([inner, states, states], dim=-1)
        expected, _ = naive_ssd(
            x.unflatten(-1, (HEADS, HEADDIM)),
            F.softplus(dt + dt_bias),
            A,
            B.unflatten(-1, (GROUPS, STATE)),
            C.unflatten(-1, (GROUPS, STATE)),
            D,
            seq_idx=seq_idx,
        )
        torch.testing.assert_close(y, expected.flatten(-2) * F.silu(z), rtol=0, atol=FP64_ATOL)


class TestPacking:
    @pytest.mark.parametrize(
        "cu_seqlens, total, expected",
        [
            ([0, 3, 5], 5, [0, 0, 0, 1, 1]),
            ([0, 3, 5], 7, [0, 0, 0, 1, 1, 2, 2]),
            ([0, 2, 2, 3], 3, [0, 0, 2]),
        ],
    )
    def test_index_of_each_token(self, cu_seqlens, total, expected):
        got = seq_idx_from_cu_seqlens(torch.tensor(cu_seqlens, dtype=torch.int32), total)
        assert got.dtype == torch.int32
        assert got.tolist() == [expected]
