# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The recurrences token by token, and a convolution: slow, short, and the oracle of the ops.

All compute in the dtype they are given. `seq_idx [B, S]` restarts the recurrence wherever the index
differs from that of the token before.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def naive_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Selective state space with one scalar decay a head (arXiv 2405.21060, eq. 2).

    With the step size dt: `h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T` and `y_t = h_t C_t + D x_t`,
    each head alone; a group of heads shares B and C.

    Args:
        x: `[B, S, H, P]`. dt: `[B, S, H]`, already positive. A: `[H]`, negative.
        B, C: `[B, S, G, N]`. D: `[H]` or `[H, P]`. initial_states: `[B, H, P, N]`.

    Returns:
        `y [B, S, H, P]` and the state after the last token, `[B, H, P, N]`.
    """
    B, C = (part.repeat_interleave(x.shape[2] // B.shape[2], dim=2) for part in (B, C))
    state = None if initial_states is None else initial_states.mT
    y, state = naive_gated_delta_rule(C, B, dt[..., None] * x, dt * A, None, 1.0, state, seq_idx)
    if D is not None:
        y = y + (D[:, None] if D.dim() == 1 else D) * x
    return y, state.mT


def naive_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    scale: float,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated delta rule (arXiv 2412.06464, eq. 10), with the state transposed to keys by values.

    With `S' = exp(g_t) S_{t-1}`: `S_t = S' + beta_t k_t (v_t - S'^T k_t)^T` and
    `o_t = scale S_t^T q_t`. Without beta, values are written as they are: `S_t = S' + k_t v_t^T`.

    Args:
        q, k: `[B, S, H, K]`. v: `[B, S, H, V]`. g: log decay, beta: writing strength, `[B, S, H]`.
        initial_state: `[B, H, K, V]`.

    Returns:
        `o [B, S, H, V]` and the state after the last token, `[B, H, K, V]`.
    """
    state = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1])
    if initial_state is not None:
        state = state + initial_state
    outputs = []
    for t in range(k.shape[1]):
        if seq_idx is not None and t > 0:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        state = state * g[:, t].exp()[..., None, None]
        written = v[:, t]
        if beta is not None:
            held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            written = beta[:, t, :, None] * (written - held)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1), state


def conv_of_each_sample(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
) -> Tensor:
    """PyTorch's depthwise convolution over each sample alone, `[B, D, S]`.

    Args:
        weight: `[D, W]`, the last column meets the current token.
        initial_states: the W - 1 inputs before the first token, `[B, D, W - 1]`.
    """
    rows = []
    for number, row in enumerate(x):
        lengths, found = [row.shape[1]], []
        if seq_idx is not None:
            lengths = seq_idx[number].unique_consecutive(return_counts=True)[1].tolist()
        before = row.new_zeros(len(row), weight.shape[1] - 1)
        for sample, inputs in enumerate(row.split(lengths, dim=1)):
            given = before if sample or initial_states is None else initial_states[number]
            window = torch.cat([given, inputs], dim=1)
            found.append(F.conv1d(window, weight[:, None], bias, groups=len(row)))
        rows.append(torch.cat(found, dim=1))
    return torch.stack(rows)
