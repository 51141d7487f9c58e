# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Our Triton kernels for a shard's state, against the reference of the gated delta rule.

Without a GPU they run in Triton's interpreter.
"""

import pytest
import torch

from megatron.core.ssm.ops.reference import chunk_gated_delta_rule
from megatron.core.ssm.state_passing.gated_delta import states as gated_delta_states
from megatron.core.ssm.state_passing.gated_delta.states import CHUNK
from tests.unit_tests.ssm.recurrent_layers import assert_close
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

# GPUs multiply fp32 matrices in TF32, of 10 bits.
TOLERANCES = {torch.float32: 2e-2 if HAVE_CUDA else 1e-5}
# The interpreter cannot multiply bf16.
TOLERANCES |= {torch.bfloat16: 4e-2} if HAVE_CUDA else {torch.float16: 5e-3}
BATCH, HEADS, OTHERS = 2, 2, 7
"""Rows, heads, and tokens of another sample that lie beside those of the sample."""


class Sample:
    """``tokens`` tokens of one sample, and the chunks' solved systems; decays stay fp32."""

    def __init__(self, tokens: int, size: int, width: int, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        self.scale = size**-0.5

        def normal(*shape):
            return torch.randn(BATCH, tokens, HEADS, *shape, device=Utils.device)

        def unit(*shape):
            return torch.nn.functional.normalize(normal(*shape), dim=-1)

        self.query, self.key = unit(size), unit(size)
        self.value, self.grad = normal(width), normal(width)
        # What enters is neither forgotten nor overwritten before the last token.
        self.g, self.beta = -normal().abs() / 64, (normal() - 2).sigmoid()
        parts = [self._solve(slice(at, at + CHUNK)) for at in range(0, tokens, CHUNK)]
        self.decay, *found = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        self.w, self.u, self.value_grad = (part.to(dtype) for part in found)
        self.query, self.key, self.grad = (
            part.to(dtype) for part in (self.query, self.key, self.grad)
        )

    def _solve(self, chunk: slice):
        """Decays, w and u of a chunk, and the gradient of what it writes by its own outputs."""
        query, key, value, grad, beta, g = (
            t[:, chunk].transpose(1, 2)
            for t in (self.query, self.key, self.value, self.grad, self.beta, self.g)
        )
        decay, beta = g.cumsum(-1), beta.unsqueeze(-1)
        between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).exp().tril()
        system = (beta * key @ key.mT * between).tril(-1)
        known = torch.cat([beta * decay.exp().unsqueeze(-1) * key, beta * value], dim=-1)
        solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        w, u = solved.split([key.shape[-1], value.shape[-1]], dim=-1)
        value_grad = (query @ key.mT * between * self.scale).mT @ grad
        return [t.transpose(1, 2).contiguous() for t in (decay, w, u, value_grad)]

    def rule(self, **state):
        return chunk_gated_delta_rule(
            self.query, self.key, self.value, self.g, self.beta, chunk_size=CHUNK, **state
        )


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request):
    return request.param


def another_sample(t):
    """Tokens that would spread if they were read."""
    return t.new_full((BATCH, OTHERS, *t.shape[2:]), torch.nan)


@pytest.mark.parametrize(
    ("tokens", "size", "width"),
    [
        pytest.param(150, 16, 32, id="last-chunk-not-full"),
        pytest.param(150, 128, 128, id="published-width"),
        pytest.param(70, 24, 72, id="blocks-not-full"),
        pytest.param(3, 8, 16, id="less-than-a-chunk"),
    ],
)
class TestAgainstTheReference:
    def test_what_tokens_leave_and_do_to_a_state(self, tokens, size, width, dtype):
        sample, wanted = Sample(tokens, size, width, dtype), []

        def enter(state, matrix):
            wanted.extend([state, matrix])
            return torch.zeros_like(state)

        sample.rule(enter=enter)
        tensors = (sample.key, sample.w, sample.u, sample.decay)
        with_another = (torch.cat([another_sample(t), t], 1) for t in tensors)
        both, *found = gated_delta_states.leaving_state(*with_another, OTHERS)
        for part, reference in zip(found, wanted, strict=True):
            assert_close(part, reference, TOLERANCES[dtype], "state or transition")
        torch.testing.assert_close(both, torch.cat([part.flatten() for part in found]))

    def test_gradient_of_the_state_that_enters(self, tokens, size, width, dtype):
        sample = Sample(tokens, size, width, dtype)
        state = torch.zeros(BATCH, HEADS, size, width, device=Utils.device, requires_grad=True)
        out, _ = sample.rule(initial_state=state)
        (wanted,) = torch.autograd.grad(out, state, sample.grad)
        inputs = (sample.query, sample.key, sample.w, sample.decay, sample.grad, sample.value_grad)
        with_another = (torch.cat([t, another_sample(t)], 1) for t in inputs)
        found = gated_delta_states.entering_gradient(*with_another, sample.scale, tokens)
        assert_close(found, wanted, TOLERANCES[dtype], "gradient")
