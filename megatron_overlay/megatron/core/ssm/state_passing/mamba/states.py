# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for the steps of a scan by chunks that ``mamba_ssm`` has no kernels for.

States of chunks are ``[B, c, H, P, N]``, contiguous; ``decay`` is the running sum of the log decay
within each chunk, fp32 ``[B, H, c, Q]``. ``seq_idx`` is the sample of each token, int32 ``[1, S]``,
or None. Each step is one launch; PyTorch would need about ten, and read the states more slowly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, CHUNKS = 512, 8
"""Numbers of state elements and of chunks that a program holds at once."""


def leaving_state(
    states: Tensor, decay: Tensor, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """State that all chunks leave if zero enters, and their decay of an entering state.

    The decay is 0 if the tokens are of several samples (``seq_idx`` given).

    Args:
        states: state that each chunk alone leaves.

    Returns:
        A flat fp32 tensor of both, and views of it: the state ``[B, H, P, N]``, and its decay
        ``[B, H, 1, 1]``.
    """
    batch, _, heads, *sizes = states.shape
    size = states[0, 0].numel() * batch
    both = states.new_empty(size + batch * heads, dtype=torch.float32)
    state, crossed = both[:size], both[size:]
    _sum_chunks(states, decay, seq_idx, state, crossed)
    return both, state.view(batch, heads, *sizes), crossed.view(batch, heads, 1, 1)


def entering_gradient(grads: Tensor, decay: Tensor, seq_idx: Tensor | None) -> Tensor:
    """Gradient of the state that enters the first chunk, fp32 ``[B, H, P, N]``.

    Args:
        grads: gradient of the state that enters each chunk, through that chunk's outputs alone.
    """
    found = grads.new_empty((grads.shape[0], *grads.shape[2:]), dtype=torch.float32)
    _sum_chunks(grads, decay, seq_idx, found, None)
    return found


def add_decay_gradients(grad: Tensor, after: Tensor, before: Tensor, of_chunk: Tensor) -> None:
    """Add the gradients of the log decay through the states to ``grad``, in place.

    Args:
        grad, after: gradients of each token's log decay, ``[B, H, c, Q]``.
        before: gradient of the running sums, whose adjoint sums from the chunk's end,
            ``[B, H, c, Q]``.
        of_chunk: gradient of the whole chunk's log decay, the last running sum, ``[B, H, c]``.
    """
    tensors = [grad, after, before, of_chunk]
    assert all(tensor.is_contiguous() for tensor in tensors)
    chunk_size = grad.shape[-1]
    width = triton.next_power_of_2(chunk_size)
    _add_decay_gradients_kernel[(of_chunk.numel(),)](*tensors, chunk_size, BLOCK=width)


def _sum_chunks(states, decay, seq_idx, found, crossed) -> None:
    batch, chunks, heads = states.shape[:3]
    chunk_size, size = decay.shape[-1], states.shape[3] * states.shape[4]
    tokens = 0 if seq_idx is None else seq_idx.shape[1]
    _sum_chunks_kernel[(triton.cdiv(size, BLOCK), heads, batch)](
        states, decay, seq_idx, found, crossed, chunks, heads, size, chunk_size, tokens,
        decay.stride(0), decay.stride(1), decay.stride(2), decay.stride(3),
        IS_PACKED=seq_idx is not None, IS_LEAVING=crossed is not None, CHUNKS=CHUNKS, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["chunks", "tokens"])
def _sum_chunks_kernel(
    states, decay, seq_idx, found, crossed, chunks, heads, size, chunk_size, tokens,
    decay_row, decay_head, decay_chunk, decay_token,
    IS_PACKED: tl.constexpr, IS_LEAVING: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the chunks' states, each times the decay from its chunk to the shard's end or start.

    Chunks are visited starting at that end or start, so the log decay accumulates from 0.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head, row = tl.program_id(1), tl.program_id(2)
    ends = decay + row * decay_row + head * decay_head + (chunk_size - 1) * decay_token
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    crossing = tl.zeros((1,), dtype=tl.float32)
    for first in range(0, chunks, CHUNKS):
        step = first + tl.arange(0, CHUNKS)
        here = step < chunks
        chunk = chunks - 1 - step if IS_LEAVING else step
        log_decay = tl.load(ends + chunk * decay_chunk, mask=here, other=0.0)
        # Summed without the chunk's own decay: subtracting it, if by far the largest, would round.
        before = chunk + 1 if IS_LEAVING else chunk - 1
        nearer = tl.load(ends + before * decay_chunk, mask=here & (step > first), other=0.0)
        weight = tl.exp(crossing + tl.cumsum(nearer, 0))
        if IS_PACKED:
            # The sample at the shard's end (its last token's) or start (its first token's, 0).
            seen = chunk if IS_LEAVING else chunk - 1
            token = tl.minimum((seen + 1) * chunk_size, tokens) - 1
            sample = tl.load(seq_idx + token, mask=here & (token >= 0), other=0)
            edge = tl.load(seq_idx + tokens - 1) if IS_LEAVING else 0
            here = here & (sample == edge)
        place = (row * chunks + chunk).to(tl.int64) * heads + head
        part = tl.load(
            states + place[:, None] * size + at[None, :],
            mask=here[:, None] & (at < size)[None, :],
            other=0.0,
        )
        total += tl.sum(weight[:, None] * part.to(tl.float32), 0)
        crossing += tl.sum(log_decay, 0)
    tl.store(found + (row * heads + head) * size + at, total, mask=at < size)
    if IS_LEAVING:
        left = tl.zeros((1,), dtype=tl.float32) if IS_PACKED else tl.exp(crossing)
        is_first = (tl.program_id(0) + tl.arange(0, 1)) == 0
        tl.store(crossed + row * heads + head + tl.arange(0, 1), left, mask=is_first)


@triton.jit
def _add_decay_gradients_kernel(grad, after, before, of_chunk, chunk_size, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < chunk_size
    place = chunk.to(tl.int64) * chunk_size + at
    sums = tl.load(before + place, mask=inside, other=0.0)
    sums += tl.where(at == chunk_size - 1, tl.load(of_chunk + chunk), 0.0)
    found = tl.load(grad + place, mask=inside, other=0.0)
    found += tl.load(after + place, mask=inside, other=0.0) + tl.cumsum(sums, 0, reverse=True)
    tl.store(grad + place, found, mask=inside)
