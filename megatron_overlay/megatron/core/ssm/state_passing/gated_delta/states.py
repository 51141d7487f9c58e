# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for a shard's effect on a state of the gated delta rule, and on its gradient.

They go through the chunks of one sample as the scan does (arXiv 2412.06464, section 3.3), without
storing intermediate states. A head's state is ``[K, V]`` with independent columns, and each program
holds a block of columns.

Keys, queries and ``w`` are ``[B, S, H, K]``, values ``[B, S, H, V]``, contiguous; ``decay`` is the
running sum of the log decay within each chunk, fp32 ``[B, S, H]``. Chunks are counted from the
sample's first token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk; ``fla`` takes no other number."""
LEAVING_COLUMNS, GRADIENT_COLUMNS = 64, 32
"""Columns of the state that a program holds; these numbers are the fastest on an H200."""


def leaving_state(
    key: Tensor, w: Tensor, u: Tensor, decay: Tensor, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """State that tokens from ``first`` on leave if zero enters, and their transition.

    Args:
        first: first token of the shard's last sample.
        w, u: the chunks' solved systems: if a state h enters a chunk, its tokens write ``u - w h``
            at their keys.

    Returns:
        A flat fp32 tensor of state and transition, and views of it: the state ``[B, H, K, V]``, and
        the transition ``[B, H, K, K]``, which multiplies an entering state from the left.
    """
    batch, tokens, heads, size = key.shape
    width = u.shape[-1]
    both = key.new_empty(batch * heads * size * (width + size), dtype=torch.float32)
    state, transition = both.split([batch * heads * size * width, batch * heads * size * size])
    blocks = triton.cdiv(width, LEAVING_COLUMNS) + triton.cdiv(size, LEAVING_COLUMNS)
    _leaving_kernel[(blocks, heads, batch)](
        key, w, u, decay, state, transition, first, tokens, heads,
        K=size, V=width, **_options(key, LEAVING_COLUMNS, of_keys=2, of_values=1),
    )  # fmt: skip
    shape = (batch, heads, size)
    return both, state.view(*shape, width), transition.view(*shape, size)


def entering_gradient(
    query: Tensor,
    key: Tensor,
    w: Tensor,
    decay: Tensor,
    grad: Tensor,
    value_grad: Tensor,
    scale: float,
    end: int,
) -> Tensor:
    """Gradient of the state before the first token, through outputs of the tokens before ``end``.

    Args:
        grad: gradient of the outputs, ``[B, S, H, V]``.
        value_grad: gradient of the values that tokens write, through outputs of the same chunk
            alone, ``[B, S, H, V]``.
        scale: factor of the outputs.
        end: end of the shard's first sample.

    Returns:
        fp32 ``[B, H, K, V]``.
    """
    batch, tokens, heads, size = key.shape
    width = grad.shape[-1]
    found = key.new_empty((batch, heads, size, width), dtype=torch.float32)
    _entering_gradient_kernel[(triton.cdiv(width, GRADIENT_COLUMNS), heads, batch)](
        query, key, w, decay, grad, value_grad, found, scale, end, tokens, heads,
        K=size, V=width, **_options(key, GRADIENT_COLUMNS, of_keys=3, of_values=2),
    )  # fmt: skip
    return found


def _options(key: Tensor, columns: int, of_keys: int, of_values: int) -> dict[str, int]:
    """Block sizes, and as many pipeline stages (two or more on a GPU) as shared memory allows.

    Args:
        of_keys: number of tensors of which a program reads all K columns.
        of_values: number of tensors of which a program reads only its block of columns.
    """
    # A Triton matrix product needs inner dims of at least 16.
    block, stages = max(16, triton.next_power_of_2(key.shape[-1])), 1
    if key.is_cuda:
        room = torch.cuda.get_device_properties(key.device).shared_memory_per_block_optin
        chunk = CHUNK * (of_keys * block + of_values * columns) * key.element_size()
        # Triton 3.6 miscompiles some blocks with a single stage, which loads nothing ahead.
        stages = max(2, min(4, int(0.9 * room) // chunk))
    sizes = {"K_BLOCK": block, "CHUNK": CHUNK, "COLUMNS": columns}
    return sizes | {"num_warps": 4, "num_stages": stages}


@triton.jit(do_not_specialize=["first", "tokens"])
def _leaving_kernel(
    key, w, u, decay, state, transition, first, tokens, heads,
    K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute a block of columns of the state (from zero) or of the transition (from identity)."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    of_state = tl.cdiv(V, COLUMNS)
    is_state = tl.program_id(0) < of_state
    block = tl.program_id(0) - tl.where(is_state, 0, of_state)
    rows, columns = tl.arange(0, K_BLOCK), block * COLUMNS + tl.arange(0, COLUMNS)
    here = tl.arange(0, CHUNK)
    is_key, is_value = (rows < K)[None, :], (columns < tl.where(is_state, V, 0))[None, :]
    is_column = (columns < tl.where(is_state, 0, K))[None, :]
    h = tl.where((rows[:, None] == columns[None, :]) & is_column, 1.0, 0.0)
    for start in range(first, tokens, CHUNK):
        inside = start + here < tokens
        at = ((row * tokens + start + here) * heads + head)[:, None]
        last = tl.minimum(start + CHUNK, tokens) - 1
        total = tl.load(decay + (row * tokens + last) * heads + head)
        log_decay = tl.load(decay + at, mask=inside[:, None], other=0.0)
        keys = tl.load(key + at * K + rows[None, :], mask=inside[:, None] & is_key, other=0.0)
        reads = tl.load(w + at * K + rows[None, :], mask=inside[:, None] & is_key, other=0.0)
        adds = tl.load(u + at * V + columns[None, :], mask=inside[:, None] & is_value, other=0.0)
        written = adds.to(tl.float32) - tl.dot(reads, h.to(reads.dtype))
        written *= tl.where(inside[:, None], tl.exp(total - log_decay), 0.0)
        h = h * tl.exp(total) + tl.dot(tl.trans(keys), written.to(keys.dtype))
    at = (row * heads + head) * K + rows[:, None]
    is_row = (rows < K)[:, None]
    tl.store(state + at * V + columns[None, :], h, mask=is_row & is_value)
    tl.store(transition + at * K + columns[None, :], h, mask=is_row & is_column)


@triton.jit(do_not_specialize=["end", "tokens"])
def _entering_gradient_kernel(
    query, key, w, decay, grad, value_grad, found, scale, end, tokens, heads,
    K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute a block of columns of the gradient, from the last chunk to the first."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, columns = tl.arange(0, K_BLOCK), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here = tl.arange(0, CHUNK)
    is_key, is_value = (rows < K)[None, :], (columns < V)[None, :]
    h_grad = tl.zeros((K_BLOCK, COLUMNS), dtype=tl.float32)
    chunks = tl.cdiv(end, CHUNK)
    for step in range(chunks):
        start = (chunks - 1 - step) * CHUNK
        inside = start + here < end
        at = ((row * tokens + start + here) * heads + head)[:, None]
        last = tl.minimum(start + CHUNK, end) - 1
        total = tl.load(decay + (row * tokens + last) * heads + head)
        log_decay = tl.load(decay + at, mask=inside[:, None], other=0.0)
        is_own_key, is_own_value = inside[:, None] & is_key, inside[:, None] & is_value
        keys = tl.load(key + at * K + rows[None, :], mask=is_own_key, other=0.0)
        asked = tl.load(query + at * K + rows[None, :], mask=is_own_key, other=0.0)
        reads = tl.load(w + at * K + rows[None, :], mask=is_own_key, other=0.0)
        out_grad = tl.load(grad + at * V + columns[None, :], mask=is_own_value, other=0.0)
        written = tl.load(value_grad + at * V + columns[None, :], mask=is_own_value, other=0.0)
        to_end = tl.where(inside[:, None], tl.exp(total - log_decay), 0.0)
        left = tl.dot(keys, h_grad.to(keys.dtype)) * to_end + written.to(tl.float32)
        of_asked = (out_grad.to(tl.float32) * tl.exp(log_decay) * scale).to(asked.dtype)
        h_grad = h_grad * tl.exp(total) + tl.dot(tl.trans(asked), of_asked)
        h_grad -= tl.dot(tl.trans(reads), left.to(reads.dtype))
    at = (row * heads + head) * K + rows[:, None]
    tl.store(found + at * V + columns[None, :], h_grad, mask=(rows < K)[:, None] & is_value)
