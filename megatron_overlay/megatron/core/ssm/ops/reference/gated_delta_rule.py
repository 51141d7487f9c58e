# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Gated delta rule by chunks (arXiv 2412.06464, section 3.3).

Each token writes `u_i` at its key: its value minus the value that the state already holds for that
key, times beta. With `s_i` the running sum of the log decay and `S` the state that enters the
chunk,

    u_i = beta_i (v_i - exp(s_i) S^T k_i - sum_{j<i} exp(s_i - s_j) (k_i . k_j) u_j)

so all `u` of a chunk solve one unit lower triangular system, linear in S. It is solved once for
both right-hand sides, and the states then pass from chunk to chunk in a short loop. Each chunk maps
the state affinely, and so does a whole row: by one matrix and one added state.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunking import (
    chunk_ids,
    pad_tokens,
    pairwise_decay,
    sees,
    seq_idx_from_cu_seqlens,
    state_ids,
)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk_size: int = 64,
    enter: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Chunked scan with the arguments of the `fla` kernel of this name, and `enter`.

    Args:
        q, k: `[B, S, H, K]`. v: `[B, S, H, V]`.
        g: log decay, not positive, `[B, S, H]`. beta: writing strength, 0 to 1, `[B, S, H]`.
        scale: factor of the output; `K ** -0.5` if None.
        initial_state: state before the first token, `[B, H, K, V]`; in a packed row it belongs to
            the first sequence.
        use_qk_l2norm_in_kernel: normalise q and k along K first.
        cu_seqlens: boundaries of a packed batch of one row, `[num_sequences + 1]`, without states.
        seq_idx: sequence of each token of a packed row, `[B, S]`; its tokens are adjacent.
        enter: function that computes the initial state instead of `initial_state`. It gets the
            state that the row leaves if zero enters, `[B, H, K, V]`, and the matrix by which the
            row multiplies an entering state, `[B, H, K, K]`. Tokens are still read only once.

    Returns:
        `o [B, S, H, V]` in v's dtype, and with `output_final_state` the state after the last token,
        `[B, H, K, V]` in the dtype of the computation (fp32 or wider), else None.

    Raises:
        ValueError: `cu_seqlens` comes with states, of which `fla` has one for each sequence; with
            `seq_idx` there is one for each row.
    """
    length = q.shape[1]
    if cu_seqlens is not None:
        if initial_state is not None or output_final_state:
            raise ValueError("states of packed rows need seq_idx instead of cu_seqlens")
        seq_idx = seq_idx_from_cu_seqlens(cu_seqlens, length)
    dtype = torch.promote_types(v.dtype, torch.float32)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q.to(dtype)), l2norm(k.to(dtype))
    size = min(chunk_size, length)
    q, k, values, g, beta = (_to_chunks(t.to(dtype), size) for t in (q, k, v, g, beta))
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)

    decay = g.cumsum(-1)
    from_start, to_end = decay.exp(), (decay[..., -1:] - decay).exp()
    ids = None
    if seq_idx is not None:
        ids = chunk_ids(seq_idx, size)
        from_start = from_start * (ids == state_ids(ids)[:, :-1, None]).unsqueeze(1)
        to_end = to_end * (ids == ids[..., -1:]).unsqueeze(1)
        ids = ids.unsqueeze(1)
    weights = pairwise_decay(decay) * sees(ids, size, decay.device)

    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.mT) * weights
    known = torch.cat([values * beta.unsqueeze(-1), k_beta * from_start.unsqueeze(-1)], dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    written, read = solved.split([values.shape[-1], k.shape[-1]], dim=-1)
    attention = (q @ k.mT) * weights
    queries = q * from_start.unsqueeze(-1)
    keys = (k * to_end.unsqueeze(-1)).mT
    kept = from_start[..., -1, None, None]

    state = values.new_zeros(*keys.shape[:2], k.shape[-1], values.shape[-1])
    if enter:
        initial_state = enter(*_row_alone(keys, kept, written, read))
    if initial_state is not None:
        state = state + initial_state
    outputs = []
    for c in range(q.shape[2]):
        update = written[:, :, c] - read[:, :, c] @ state
        outputs.append(queries[:, :, c] @ state + attention[:, :, c] @ update)
        state = kept[:, :, c] * state + keys[:, :, c] @ update
    o = torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2).to(v.dtype)
    return o, state if output_final_state else None


def _row_alone(keys: Tensor, kept: Tensor, written: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    """State that all chunks leave if zero enters `[B, H, K, V]`; their matrix `[B, H, K, K]`."""
    size, width = keys.shape[3], written.shape[-1]
    identity = torch.eye(size, dtype=keys.dtype, device=keys.device)
    matrices = kept * identity - keys @ read
    # Side by side, both are multiplied by the chunks' matrices; only the state is added to.
    both = F.pad(identity, (width, 0)).expand(*keys.shape[:2], -1, -1)
    added = F.pad(keys @ written, (0, size))
    for c in range(keys.shape[2]):
        both = matrices[:, :, c] @ both + added[:, :, c]
    state, matrix = both.split([width, size], dim=-1)
    return state, matrix


def _to_chunks(t: Tensor, size: int) -> Tensor:
    """Cut `[B, S, H, ...]` into chunks `[B, H, c, Q, ...]`; zero padding keeps the state."""
    t = pad_tokens(t, -t.shape[1] % size)
    return t.unflatten(1, (-1, size)).movedim(3, 1)


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """Compute `x / sqrt(sum(x^2) + eps)` along `dim`, in fp32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(dim, keepdim=True) + eps)).to(x.dtype)
