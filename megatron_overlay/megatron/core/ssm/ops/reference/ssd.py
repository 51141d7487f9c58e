# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""State-space duality scan of Mamba-2, by blocks (arXiv 2405.21060, section 6).

The sequence is cut into chunks of Q tokens. Within one, with `s_i` the running sum of the log decay
`dt A`, the output is a masked attention: `y_i = sum_{j<=i} (C_i . B_j) exp(s_i - s_j) dt_j x_j`.
Each chunk also leaves a state `sum_j exp(s_Q - s_j) dt_j x_j B_j^T`; the state h that enters a
chunk is the decayed sum of those before it, and adds `exp(s_i) h C_i` to the output.

Every decay is the exponential of a sum of non-positive terms, formed before it is exponentiated, so
nothing overflows at any length. Memory grows with S * Q and with (S / Q) ** 2, not with S ** 2.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunking import chunk_ids, pad_tokens, pairwise_decay, sees, state_ids


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
    enter: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Chunked scan with the arguments of the `mamba_ssm` kernel of this name, and `enter`.

    Args:
        x: `[B, S, H, P]`; S need not be a multiple of `chunk_size`.
        dt: step sizes, `[B, S, H]`, before `dt_bias [H]` and softplus.
        A: log decay per unit of dt, negative, `[H]`.
        B, C: `[B, S, G, N]`; G divides H, and head h uses group `h // (H / G)`.
        D: skip weight, `[H]` or `[H, P]`.
        z: gate, `[B, S, H, P]`: the output is multiplied by silu(z).
        initial_states: state before the first token, `[B, H, P, N]`; in a packed row it belongs to
            the first sequence.
        seq_idx: sequence of each token of a packed row, `[B, S]`; its tokens are adjacent.
        enter: function that computes the initial states instead of `initial_states`. It gets the
            state that the row leaves if zero enters, `[B, H, P, N]`, and the row's decay of an
            entering state, `[B, H, 1, 1]`. Tokens are still read only once.

    Returns:
        `y [B, S, H, P]` in x's dtype, and with `return_final_states` also the state after the last
        token, `[B, H, P, N]`, in the dtype of the computation (fp32 or wider).
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    length = x.shape[1]
    dt = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
    dt = F.softplus(dt) if dt_softplus else dt
    chunks = _Chunks(x.shape, B.shape, min(chunk_size, length))

    decay = chunks.by_head(dt * A.to(dtype)).cumsum(-1)
    x_dt = chunks.by_group(x.to(dtype) * dt.unsqueeze(-1))
    keys = chunks.by_group(B.to(dtype))
    queries = chunks.by_group(C.to(dtype))
    ids = None if seq_idx is None else chunk_ids(seq_idx, chunks.size)

    y = _within_chunks(chunks, decay, x_dt, keys, queries, ids)
    if chunks.count > 1 or initial_states is not None or enter or return_final_states:
        states = _chunk_states(chunks, decay, x_dt, keys, ids)
        if enter:
            initial_states = enter(*_row_alone(states, decay, ids))
        boundaries = _pass_states(states, decay, initial_states, ids)
        y = y + _from_entering_states(boundaries[:, :-1], decay, queries, ids)
    y = chunks.to_sequence(y)

    if D is not None:
        y = y + (D.unsqueeze(-1) if D.dim() == 1 else D).to(dtype) * x
    if z is not None:
        y = y * F.silu(z.to(dtype))
    y = y.to(x.dtype)
    return (y, boundaries[:, -1].flatten(1, 2)) if return_final_states else y


class _Chunks:
    """Shapes of one call, and the conversions between a sequence and its chunks.

    Chunked tensors are `[B, c, G, ...]`: c chunks of Q tokens, G groups of R heads. The last chunk
    is padded with zeros, which do not change the state because dt is zero there.
    """

    def __init__(self, x_shape: torch.Size, b_shape: torch.Size, size: int) -> None:
        self.batch, self.length, self.heads, self.headdim = x_shape
        self.groups = b_shape[2]
        self.heads_per_group = self.heads // self.groups
        self.size = size
        self.count = -(-self.length // size)
        self.padding = self.count * size - self.length

    def by_head(self, t: Tensor) -> Tensor:
        """Rearrange `[B, S, H]` to `[B, c, G, R, Q]`."""
        t = pad_tokens(t, self.padding)
        t = t.view(self.batch, self.count, self.size, self.groups, self.heads_per_group)
        return t.permute(0, 1, 3, 4, 2)

    def by_group(self, t: Tensor) -> Tensor:
        """Rearrange `[B, S, G or H, K]` to `[B, c, G, Q, K or R * K]`."""
        t = t.reshape(self.batch, self.length, self.groups, -1)
        t = pad_tokens(t, self.padding)
        return t.view(self.batch, self.count, self.size, self.groups, -1).transpose(2, 3)

    def split_heads(self, t: Tensor) -> Tensor:
        """Rearrange `[B, c, G, Q, R * P]` to `[B, c, G, R, Q, P]`."""
        return t.unflatten(-1, (self.heads_per_group, self.headdim)).transpose(3, 4)

    def to_sequence(self, y: Tensor) -> Tensor:
        """Rearrange `[B, c, G, R, Q, P]` to `[B, S, H, P]`, without padding."""
        y = y.permute(0, 1, 4, 2, 3, 5).reshape(self.batch, -1, self.heads, self.headdim)
        return y[:, : self.length]


def _within_chunks(
    chunks: _Chunks, decay: Tensor, x_dt: Tensor, keys: Tensor, queries: Tensor, ids: Tensor | None
) -> Tensor:
    """Outputs from tokens of the same chunk, `[B, c, G, R, Q, P]`."""
    ids = None if ids is None else ids[:, :, None, None]
    visible = sees(ids, chunks.size, decay.device)
    scores = (queries @ keys.transpose(-1, -2)).unsqueeze(3)
    weights = (scores * visible) * pairwise_decay(decay)
    return weights @ chunks.split_heads(x_dt)


def _chunk_states(
    chunks: _Chunks, decay: Tensor, x_dt: Tensor, keys: Tensor, ids: Tensor | None
) -> Tensor:
    """State that each chunk alone leaves at its end, `[B, c, G, R, P, N]`."""
    weight = (decay[..., -1:] - decay).exp()
    if ids is not None:
        weight = weight * (ids == ids[..., -1:])[:, :, None, None]
    values = chunks.split_heads(x_dt) * weight.unsqueeze(-1)
    return values.transpose(-1, -2) @ keys.unsqueeze(3)


def _pass_states(
    states: Tensor, decay: Tensor, initial_states: Tensor | None, ids: Tensor | None
) -> Tensor:
    """States at the c + 1 chunk boundaries, `[B, c + 1, G, R, P, N]`.

    All are computed at once: boundary k has the sum over sources z <= k, where source 0 is the
    initial state and source z the state that chunk z - 1 left, each decayed by the chunks between z
    and k.
    """
    if initial_states is None:
        first = torch.zeros_like(states[:, :1])
    else:
        first = initial_states.to(states.dtype).reshape(states[:, :1].shape)
    sources = torch.cat([first, states], dim=1)
    total = F.pad(decay[..., -1].permute(0, 2, 3, 1).cumsum(-1), (1, 0))
    owners = None if ids is None else state_ids(ids)[:, None, None]
    weights = pairwise_decay(total) * sees(owners, total.shape[-1], total.device)
    return torch.einsum("bgrkz,bzgrpn->bkgrpn", weights, sources)


def _row_alone(states: Tensor, decay: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """State that all chunks leave if zero enters `[B, H, P, N]`; their decay `[B, H, 1, 1]`."""
    total = decay[..., -1].cumsum(1)
    weight = (total[:, -1:] - total).exp()
    crossed = total[:, -1].exp()
    if ids is not None:
        ends = ids[:, :, -1]
        weight = weight * (ends == ends[:, -1:])[:, :, None, None]
        crossed = crossed * (ids[:, 0, 0] == ids[:, -1, -1])[:, None, None]
    left = (states * weight[..., None, None]).sum(1)
    return left.flatten(1, 2), crossed.flatten(1)[..., None, None]


def _from_entering_states(
    entering: Tensor,
    decay: Tensor,
    queries: Tensor,
    ids: Tensor | None,
) -> Tensor:
    """Outputs from the state that enters each chunk, `[B, c, G, R, Q, P]`."""
    weight = decay.exp()
    if ids is not None:
        owners = state_ids(ids)[:, :-1, None]
        weight = weight * (ids == owners)[:, :, None, None]
    return (queries.unsqueeze(3) @ entering.transpose(-1, -2)) * weight.unsqueeze(-1)
