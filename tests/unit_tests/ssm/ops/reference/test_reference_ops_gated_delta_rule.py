# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The chunked gated delta rule against its recurrence. No process group, no GPU.

Tolerances as in test_reference_ops: fp64 1e-10 absolute, fp32 1e-5 of the largest value.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ssm.ops.reference import chunk_gated_delta_rule
from tests.unit_tests.ssm.ops.reference.naive_ops import naive_gated_delta_rule

FP64_ATOL = 1e-10
FP32_RTOL = 1e-5
BATCH, LENGTH, HEADS, KEY, VALUE = 2, 37, 3, 4, 5
BY_TOKEN = ("q", "k", "v", "g", "beta")
LENGTHS = [3, 5, 1, 20, 8]


def make_inputs(
    batch=BATCH, length=LENGTH, heads=HEADS, key=KEY, value=VALUE
) -> dict[str, torch.Tensor]:
    """Unit keys, as after the norm of the layer; decays of 0.5 to 1 a token; beta 0 to 1."""
    generator = torch.Generator().manual_seed(1234)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "q": F.normalize(normal(batch, length, heads, key), dim=-1),
        "k": F.normalize(normal(batch, length, heads, key), dim=-1),
        "v": normal(batch, length, heads, value),
        "g": -0.7 * torch.rand(batch, length, heads, generator=generator, dtype=torch.float64),
        "beta": normal(batch, length, heads).sigmoid(),
        "initial_state": normal(batch, heads, key, value),
    }


def packed_rows() -> torch.Tensor:
    row = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return torch.stack([row, row // 2])


def run(inputs, chunk_size, seq_idx=None):
    return chunk_gated_delta_rule(
        **inputs, seq_idx=seq_idx, chunk_size=chunk_size, output_final_state=True
    )


def oracle(inputs, seq_idx=None):
    return naive_gated_delta_rule(**inputs, scale=inputs["q"].shape[-1] ** -0.5, seq_idx=seq_idx)


def assert_equal(got, expected) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=FP64_ATOL)


class TestChunkGatedDeltaRule:
    @pytest.mark.parametrize("chunk_size", [1, 8, 16, 64])
    @pytest.mark.parametrize("packed", [False, True])
    def test_fp64_equals_recurrence(self, chunk_size, packed):
        inputs = make_inputs()
        seq_idx = packed_rows() if packed else None
        assert_equal(run(inputs, chunk_size, seq_idx), oracle(inputs, seq_idx))

    def test_fp32_is_close_to_fp64_recurrence(self):
        inputs = make_inputs(length=300)
        got = run({k: v.float() for k, v in inputs.items()}, 64)
        for a, b in zip(got, oracle(inputs), strict=True):
            assert a.dtype == torch.float32
            assert (a.double() - b).abs().max() / b.abs().max() <= FP32_RTOL

    @pytest.mark.parametrize("packed", [False, True])
    def test_gradients_of_every_input(self, packed):
        inputs = make_inputs(batch=1, length=7, heads=1, key=2, value=2)
        seq_idx = torch.tensor([[0, 0, 0, 1, 1, 1, 2]]) if packed else None
        names = list(inputs)
        leaves = [inputs[name].requires_grad_() for name in names]
        assert torch.autograd.gradcheck(
            lambda *values: run(dict(zip(names, values, strict=True)), 3, seq_idx), leaves
        )

    @pytest.mark.parametrize("chunk_size", [8, 16])
    def test_packed_row_equals_separate_sequences(self, chunk_size):
        inputs = make_inputs(batch=1)
        del inputs["initial_state"]
        boundaries = torch.tensor([0, *LENGTHS]).cumsum(0)
        o, state = chunk_gated_delta_rule(**inputs, cu_seqlens=boundaries, chunk_size=chunk_size)
        assert state is None
        for start, end in zip(boundaries[:-1], boundaries[1:], strict=True):
            part = {name: value[:, start:end] for name, value in inputs.items()}
            assert_equal([o[:, start:end]], oracle(part)[:1])

    @pytest.mark.parametrize("cut", [1, 16, 20, 36])
    def test_state_carries_one_half_into_the_other(self, cut):
        inputs = make_inputs()
        first, second = (
            {k: v[:, part] if k in BY_TOKEN else v for k, v in inputs.items()}
            for part in (slice(cut), slice(cut, None))
        )
        first_o, state = run(first, 8)
        second_o, state = run(second | {"initial_state": state}, 8)
        assert_equal([torch.cat([first_o, second_o], dim=1), state], run(inputs, 8))

    def test_normalises_queries_and_keys_when_asked(self):
        inputs = make_inputs()
        scaled = inputs | {"q": inputs["q"] * 3, "k": inputs["k"] * 5}
        o, _ = chunk_gated_delta_rule(**scaled, use_qk_l2norm_in_kernel=True, scale=1.0)
        expected, _ = naive_gated_delta_rule(**inputs, scale=1.0)
        # The norm adds 1e-6 to the squared length, here 9 and 25.
        torch.testing.assert_close(o, expected, rtol=0, atol=1e-6)

    def test_states_of_packed_boundaries_are_refused(self):
        inputs = make_inputs(batch=1)
        with pytest.raises(ValueError, match="seq_idx"):
            chunk_gated_delta_rule(**inputs, cu_seqlens=torch.tensor([0, LENGTH]))
