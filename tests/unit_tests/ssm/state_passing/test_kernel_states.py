# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Our Triton kernels for a shard's state, against the reference of the gated delta rule, and
Mamba-2's recurrence gone through chunk by chunk.

Without a GPU they run in Triton's interpreter.
"""

import math

import pytest
import torch

from megatron.core.ssm.ops.reference import chunk_gated_delta_rule
from megatron.core.ssm.state_passing.gated_delta import states as gated_delta_states
from megatron.core.ssm.state_passing.gated_delta.states import CHUNK
from megatron.core.ssm.state_passing.mamba import states as mamba_states
from tests.unit_tests.ssm.recurrent_layers import assert_close
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

# GPUs multiply fp32 matrices in TF32, of 10 bits.
TOLERANCES = {torch.float32: 2e-2 if HAVE_CUDA else 1e-5}
# The interpreter cannot multiply bf16.
TOLERANCES |= {torch.bfloat16: 4e-2} if HAVE_CUDA else {torch.float16: 5e-3}
BATCH, HEADS, OTHERS = 2, 3, 7
"""Rows, heads, and tokens of another sample that lie beside those of the sample."""
SHORT_CHUNK = 16
"""Tokens of a chunk of Mamba-2, which takes any number."""


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


def gone_through(states, decay, ends, entering):
    """The state that enters each chunk, and the one that leaves the last."""
    state, sample, entered = entering, 0, []
    for chunk, own in enumerate(states.unbind(1)):
        entered.append(state)
        left = decay[:, :, chunk, -1].exp()[..., None, None]
        state = own + (left * state if ends[chunk] == sample else 0)
        sample = ends[chunk]
    return torch.stack(entered, 1), state


@pytest.mark.parametrize(
    ("batch", "state", "bounds"),
    [
        pytest.param(2, (4, 40), (310,), id="two-rows"),
        pytest.param(1, (30, 20), (310,), id="state-of-more-than-a-block"),
        pytest.param(1, (4, 40), (100, 7, 13, 190), id="packed"),
        pytest.param(1, (4, 40), (15, 16), id="packed-in-two-chunks"),
        pytest.param(2, (4, 8), (5,), id="less-than-a-chunk"),
    ],
)
def test_a_state_crosses_the_chunks(batch, state, bounds):
    torch.manual_seed(1)
    tokens = sum(bounds)
    chunks = -(-tokens // SHORT_CHUNK)
    seq_idx, ends = None, [0] * chunks
    if len(bounds) > 1:
        samples = torch.arange(len(bounds), dtype=torch.int32).repeat_interleave(
            torch.tensor(bounds)
        )
        ends = [samples[min((c + 1) * SHORT_CHUNK, tokens) - 1].item() for c in range(chunks)]
        seq_idx = samples.unsqueeze(0).to(Utils.device)
    states = torch.randn(batch, chunks, HEADS, *state, device=Utils.device)
    grads = torch.randn_like(states)
    decay = (
        -torch.rand(batch, HEADS, chunks, SHORT_CHUNK, device=Utils.device).cumsum(-1) / SHORT_CHUNK
    )
    entering = torch.randn(batch, HEADS, *state, device=Utils.device, requires_grad=True)

    both, left, crossed = mamba_states.leaving_state(states, decay, seq_idx)
    assert torch.equal(both, torch.cat([left.flatten(), crossed.flatten()]))
    _, alone = gone_through(states, decay, ends, torch.zeros_like(entering))
    torch.testing.assert_close(left, alone)
    _, leaving = gone_through(states, decay, ends, entering)
    torch.testing.assert_close(crossed * entering + left, leaving)

    entered, _ = gone_through(states, decay, ends, entering)
    (wanted,) = torch.autograd.grad(entered, entering, grads)
    torch.testing.assert_close(mamba_states.entering_gradient(grads, decay, seq_idx), wanted)


def test_a_chunk_that_forgets_all_leaves_the_others_exact():
    states = torch.ones(1, 3, 1, 2, 2, device=Utils.device)
    decay = torch.tensor([-0.5, -1e6, -0.25], device=Utils.device).view(1, 1, 3, 1)
    found, _, _ = mamba_states.leaving_state(states, decay, None)
    torch.testing.assert_close(found[:4], torch.full_like(found[:4], 1 + math.exp(-0.25)))
    assert found[4] == 0


@pytest.mark.parametrize("chunk", [16, 24, 128])
def test_gradients_of_the_decay_add_up(chunk):
    torch.manual_seed(1)
    grad, after, before = torch.randn(3, 2, HEADS, 4, chunk, device=Utils.device).unbind()
    of_chunk = torch.randn(2, HEADS, 4, device=Utils.device)
    log_decay = torch.zeros_like(before, requires_grad=True)
    sums = log_decay.cumsum(-1)
    through_sums = (sums * before).sum() + (sums[..., -1] * of_chunk).sum()
    (wanted,) = torch.autograd.grad(through_sums, log_decay)
    wanted = grad + after + wanted
    mamba_states.add_decay_gradients(grad, after, before, of_chunk)
    torch.testing.assert_close(grad, wanted)
