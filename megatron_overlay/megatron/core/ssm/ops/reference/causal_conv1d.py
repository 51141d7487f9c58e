# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Short depthwise causal convolution, as a sum of shifted products.

The window of Mamba layers is a few tokens wide, so W shifted multiply-adds over the whole row are
cheap. They keep the memory order of the input, and handle packed rows by masking.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Compute `y_t = activation(bias + sum_k weight[:, W - 1 - k] x_{t-k})`, k = 0 .. W - 1.

    Args:
        x: `[B, D, S]`, in any memory order (the output has the same).
        weight: `[D, W]`. bias: `[D]`.
        seq_idx: sequence of each token of a packed row, `[B, S]`. Tokens of a sequence are
            adjacent; the window does not reach into the sequence before.
        initial_states: inputs before the first token, `[B, D, W - 1]`; in a packed row they belong
            to the first sequence.
        activation: None, "silu" or "swish" (the same).

    Returns:
        `y [B, D, S]`.
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation must be None, 'silu' or 'swish', not {activation!r}")
    reach, length = weight.shape[1] - 1, x.shape[-1]
    if initial_states is None:
        row = F.pad(x, (reach, 0))
    else:
        row = torch.cat([initial_states.to(x.dtype), x], dim=-1)
    ids = None
    if seq_idx is not None:
        ids = torch.cat([seq_idx[:, :1].expand(-1, reach), seq_idx], dim=1)

    y = x * weight[:, -1:]
    if bias is not None:
        y = y + bias.unsqueeze(-1)
    for start in range(reach):
        shifted = row[..., start : start + length]
        if ids is not None:
            shifted = shifted * (ids[:, start : start + length] == seq_idx).unsqueeze(1)
        y = torch.addcmul(y, shifted, weight[:, start : start + 1])
    return y if activation is None else F.silu(y)
