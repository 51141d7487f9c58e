# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Scan of a linear recurrence by chunks: Mamba-2's, and with ``beta`` the gated delta rule.

Each token i writes a value `u_i` at its key: `S_i = exp(g_i) S_{i-1} + k_i u_i^T`, and reads
`o_i = S_i^T q_i`. In Mamba-2 (arXiv 2405.21060, section 6) `u_i` is the token's value. In the gated
delta rule (arXiv 2412.06464, section 3.3) it is beta times what the value differs from that which
the state already holds for the key.

The sequence is cut into chunks of Q tokens. Within one, with `s_i` the running sum of g and S the
state that enters the chunk, the output is a masked attention and a part linear in S:

    o_i = exp(s_i) S^T q_i + sum_{j<=i} exp(s_i - s_j) (q_i . k_j) u_j

and under the delta rule, all `u` of a chunk solve one unit lower triangular system, linear in S:

    u_i = beta_i (v_i - exp(s_i) S^T k_i - sum_{j<i} exp(s_i - s_j) (k_i . k_j) u_j)

Every decay is the exponential of a sum of non-positive terms, formed before it is exponentiated, so
nothing overflows at any length. Below, `ids [B, c, Q]` is the sequence index of each token of c
chunks.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Enter = Callable[[Tensor, Tensor], Tensor]


def chunked_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    chunk_size: int,
    beta: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    enter: Enter | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan each row of tokens; all tensors have the dtype of the computation.

    Args:
        q, k: `[B, S, G, K]`; G divides H, and head h uses group `h // (H / G)`.
        v: `[B, S, H, V]`.
        g: log decay, not positive, `[B, S, H]`.
        chunk_size: Q; S need not be a multiple of it.
        beta: writing strength of the delta rule, `[B, S, H]`; None for plain values.
        seq_idx: sequence of each token of a packed row, `[B, S]`; its tokens are adjacent.
        initial_state: state before the first token, `[B, H, K, V]`; in a packed row it belongs to
            the first sequence.
        enter: function that computes the initial state instead. It gets the state that the row
            leaves if zero enters, `[B, H, K, V]`, and what the row multiplies an entering state
            by: a decay `[B, H, 1, 1]`, or under the delta rule a matrix `[B, H, K, K]`, from the
            left. Tokens are still read only once.

    Returns:
        `o [B, S, H, V]` and the state after the last token, `[B, H, K, V]`.
    """
    length, groups = k.shape[1:3]
    size = min(chunk_size, length)
    q, k, v, g = (_to_chunks(t, size, groups) for t in (q, k, v, g))
    decay = g.cumsum(-1)
    from_start, to_end = decay.exp(), (decay[..., -1:] - decay).exp()
    ids = None
    if seq_idx is not None:
        ids = _chunk_ids(seq_idx, size)
        entered = torch.cat([ids[:, :1, 0], ids[:, :-1, -1]], dim=1)  # sequence of the state
        from_start = from_start * (ids == entered.unsqueeze(-1))[:, None, None]
        to_end = to_end * (ids == ids[..., -1:])[:, None, None]
    # exp(s_i - s_j), [..., Q, Q]; `visible` masks out j > i.
    weights = _BoundedExp.apply(decay.unsqueeze(-1) - decay.unsqueeze(-2))
    visible = _sees(ids, size, decay.device)
    attention = (q @ k.mT * visible) * weights
    from_start, to_end = from_start.unsqueeze(-1), to_end.unsqueeze(-1)
    kept = from_start[..., -1:, :]

    written, read = v, None
    if beta is not None:
        beta = _to_chunks(beta, size, groups).unsqueeze(-1)
        strong = beta * k
        system = (strong @ k.mT * visible) * weights
        known = torch.cat([beta * v, strong * from_start], dim=-1)
        solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        written, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    state = initial_state
    if enter:
        state = enter(*(t.flatten(1, 2) for t in _row_alone(k.mT, to_end, kept, written, read)))
    state = None if state is None else state.unflatten(1, (groups, -1))
    outputs = []
    by_chunk = (t.unbind(3) for t in (q, k.mT, written, attention, from_start, to_end, kept))
    reads = [None] * k.shape[3] if read is None else read.unbind(3)
    for *chunk, asked in zip(*by_chunk, reads, strict=True):
        query, key, update, seen, start, end, keep = chunk
        if state is not None and asked is not None:
            update = update - asked @ state
        output, added = seen @ update, key @ (update * end)
        if state is not None:
            output = output + (query @ state) * start
            added = added + keep * state
        outputs.append(output)
        state = added
    o = torch.cat(outputs, dim=3)[..., :length, :].flatten(1, 2)
    return o.transpose(1, 2), state.flatten(1, 2)


def seq_idx_from_cu_seqlens(cu_seqlens: Tensor, total_tokens: int) -> Tensor:
    """Sequence index of each token of one packed row.

    Args:
        cu_seqlens: start of each sequence, then the end of the last one, `[num_sequences + 1]`.
        total_tokens: length of the row; tokens past `cu_seqlens[-1]` (padding) form one more
            sequence.

    Returns:
        `[1, total_tokens]` int32. Empty sequences use up an index.
    """
    tokens = torch.arange(total_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(tokens, cu_seqlens[1:], right=True, out_int32=True).unsqueeze(0)


def _row_alone(
    keys: Tensor, to_end: Tensor, kept: Tensor, written: Tensor, read: Tensor | None
) -> tuple[Tensor, Tensor]:
    """State that all chunks leave if zero enters, and what they multiply an entering state by.

    Args:
        keys: `[B, G, 1 or R, c, K, Q]`.
    """
    added = (keys @ (written * to_end)).unbind(3)
    if read is None:
        steps, apply = kept, torch.mul
    else:
        identity = torch.eye(keys.shape[-2], dtype=keys.dtype, device=keys.device)
        steps, apply = kept * identity - keys @ (read * to_end), torch.matmul
    state, whole = added[0], steps[:, :, :, 0]
    for step, more in zip(steps.unbind(3)[1:], added[1:], strict=True):
        state, whole = apply(step, state) + more, apply(step, whole)
    return state, whole


def _to_chunks(t: Tensor, size: int, groups: int) -> Tensor:
    """Cut `[B, S, heads, ...]` into chunks `[B, G, heads/G, c, Q, ...]`; zeros keep the state."""
    t = F.pad(t, (0, 0) * (t.dim() - 2) + (0, -t.shape[1] % size))
    return t.unflatten(2, (groups, -1)).unflatten(1, (-1, size)).movedim((3, 4), (1, 2))


def _chunk_ids(seq_idx: Tensor, size: int) -> Tensor:
    """Cut `seq_idx [B, S]` into chunks `[B, c, Q]`; padding belongs to the last sequence."""
    padding = -seq_idx.shape[1] % size
    seq_idx = torch.cat([seq_idx, seq_idx[:, -1:].expand(-1, padding)], dim=1)
    return seq_idx.unflatten(1, (-1, size))


def _sees(ids: Tensor | None, size: int, device: torch.device) -> Tensor:
    """Whether token i sees token j <= i: `[Q, Q]`, or `[B, 1, 1, c, Q, Q]` given ids."""
    visible = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    if ids is not None:
        visible = visible & (ids.unsqueeze(-1) == ids.unsqueeze(-2))[:, None, None]
    return visible


class _BoundedExp(torch.autograd.Function):
    """exp clamped to at most 1, so that the masked half does not overflow, and to well above the
    smallest normal number, as CPUs are many times slower below it.

    The gradient ignores the clamp: where the upper bound acts it is masked, and where the lower
    bound acts it is lost in rounding. This saves four passes over the largest tensor of a scan.
    """

    @staticmethod
    def forward(ctx, gap: Tensor) -> Tensor:
        decay = gap.clamp(0.7 * math.log(torch.finfo(gap.dtype).tiny), 0).exp_()
        ctx.save_for_backward(decay)
        return decay

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (decay,) = ctx.saved_tensors
        return grad * decay
