# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Our Triton kernels against the recurrence gone through chunk by chunk.

Without a GPU they run in Triton's interpreter.
"""

import math

import pytest
import torch

from megatron.core.ssm.state_passing.mamba import states as mamba_states
from tests.unit_tests.test_utilities import Utils

HEADS, CHUNK = 3, 16
DEVICE = Utils.device


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
    chunks = -(-tokens // CHUNK)
    seq_idx, ends = None, [0] * chunks
    if len(bounds) > 1:
        samples = torch.arange(len(bounds), dtype=torch.int32).repeat_interleave(
            torch.tensor(bounds)
        )
        ends = [samples[min((c + 1) * CHUNK, tokens) - 1].item() for c in range(chunks)]
        seq_idx = samples.unsqueeze(0).to(DEVICE)
    states = torch.randn(batch, chunks, HEADS, *state, device=DEVICE)
    grads = torch.randn_like(states)
    decay = -torch.rand(batch, HEADS, chunks, CHUNK, device=DEVICE).cumsum(-1) / CHUNK
    entering = torch.randn(batch, HEADS, *state, device=DEVICE, requires_grad=True)

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
    states = torch.ones(1, 3, 1, 2, 2, device=DEVICE)
    decay = torch.tensor([-0.5, -1e6, -0.25], device=DEVICE).view(1, 1, 3, 1)
    found, _, _ = mamba_states.leaving_state(states, decay, None)
    torch.testing.assert_close(found[:4], torch.full_like(found[:4], 1 + math.exp(-0.25)))
    assert found[4] == 0


@pytest.mark.parametrize("chunk", [16, 24, 128])
def test_gradients_of_the_decay_add_up(chunk):
    torch.manual_seed(1)
    grad, after, before = torch.randn(3, 2, HEADS, 4, chunk, device=DEVICE).unbind()
    of_chunk = torch.randn(2, HEADS, 4, device=DEVICE)
    log_decay = torch.zeros_like(before, requires_grad=True)
    sums = log_decay.cumsum(-1)
    through_sums = (sums * before).sum() + (sums[..., -1] * of_chunk).sum()
    (wanted,) = torch.autograd.grad(through_sums, log_decay)
    wanted = grad + after + wanted
    mamba_states.add_decay_gradients(grad, after, before, of_chunk)
    torch.testing.assert_close(grad, wanted)
