# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Convolution, norm and their fusions against `naive_ops`. No process group, no GPU.

The tolerance is fp64 1e-10 absolute on values of order 1: rounding of 100 terms is below 1e-12.
"""

import importlib.util

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ssm.ops.reference import (
    RMSNormGated,
    causal_conv1d_fn,
    mamba_split_conv1d_scan_combined,
    seq_idx_from_cu_seqlens,
)
from megatron.core.ssm.ops.reference.stand_in import stand_in_for
from tests.unit_tests.ssm.ops.reference.naive_ops import (
    naive_causal_conv1d,
    naive_rms_norm_gated,
    naive_ssd,
)
from tests.unit_tests.ssm.ops.reference.test_reference_ops_chunked import numbers, packed_rows

FP64_ATOL = 1e-10
BATCH, LENGTH, HEADS, HEADDIM, GROUPS, STATE = 2, 37, 6, 3, 2, 5


def conv_inputs() -> dict[str, torch.Tensor]:
    shapes = {"x": (2, 5, LENGTH), "weight": (5, 4), "bias": (5,), "initial_states": (2, 5, 3)}
    normal = numbers()
    return {name: normal(*shape) for name, shape in shapes.items()}


class TestCausalConv1d:
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("left_out", [(), ("bias", "initial_states")])
    def test_equals_sliding_window(self, packed, left_out):
        inputs = {k: v for k, v in conv_inputs().items() if k not in left_out}
        seq_idx = packed_rows() if packed else None
        y = causal_conv1d_fn(**inputs, seq_idx=seq_idx, activation="silu")
        expected_y, _ = naive_causal_conv1d(**inputs, seq_idx=seq_idx)
        torch.testing.assert_close(y, F.silu(expected_y), rtol=0, atol=FP64_ATOL)

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

    def test_group_size_that_does_not_divide_is_refused(self):
        with pytest.raises(ValueError, match="group_size 5"):
            RMSNormGated(12, group_size=5)


class TestSplitConvScan:
    @pytest.mark.parametrize("packed", [False, True])
    def test_equals_convolution_recurrence_and_gate_in_turn(self, packed):
        inner, states, normal = HEADS * HEADDIM, GROUPS * STATE, numbers()
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


class TestStandIn:
    @pytest.fixture(autouse=True)
    def nothing_said(self):
        stand_in_for.cache_clear()

    def test_broken_installation_is_refused(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        with pytest.raises(ImportError, match="mamba_ssm is installed"):
            stand_in_for("mamba_ssm", "Mamba layers")

    def test_is_said_once(self, caplog, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        stand_in_for("mamba_ssm", "Mamba layers")
        stand_in_for("mamba_ssm", "Mamba layers")
        assert len(caplog.records) == 1
