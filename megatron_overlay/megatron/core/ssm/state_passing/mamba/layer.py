# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 mixer that passes states: every rank has all heads of its own tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.ops.reference import mamba_split_conv1d_scan_combined
from megatron.core.ssm.state_passing.gpu_kernels import gpu_kernels
from megatron.core.ssm.state_passing.layer_tokens import exchange_halo
from megatron.core.ssm.state_passing.scan_over_ranks import carry_state
from megatron.core.token_layout.recurrence_plan import RecurrencePlan


class Weights(NamedTuple):
    """Convolution ``[H·P + 2·G·N, W]`` and its bias, time-step bias and A (negative) ``[H]``, and D
    ``[H]`` or ``[H, P]``."""

    conv: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    A: Tensor
    D: Tensor


class Sizes(NamedTuple):
    """Tokens of a chunk, P, and G."""

    chunk: int
    headdim: int
    ngroups: int


def forward(mixer, hidden_states: Tensor, inference_context, packed: PackedSeqParams | None):
    """Run a training forward of upstream's ``MambaMixer``; a collective.

    Args:
        mixer: a mixer with ``layer_tokens``, whose parameters are those of one TP rank, not split
            over CP.
        hidden_states: ``[S/(cp·sp), B, H]``.
        packed: parameters of a packed batch, with global ``cu_seqlens``; B is 1.

    Returns:
        Output ``[S/(cp·sp), B, H]`` and bias, as from the mixer's own forward.

    Raises:
        ValueError: there is an inference context, or the tokens do not divide over the ranks.
    """
    tokens = mixer.layer_tokens
    if inference_context is not None:
        raise ValueError(
            f"inference takes cp=1; this Mamba layer passes states over cp={tokens.cp_size}"
        )
    plan = tokens.recurrence(hidden_states, packed)
    projected = tokens.project_in(hidden_states, packed, plan, mixer.in_proj)
    kernels = gpu_kernels("mamba.kernels") if projected.is_cuda else None
    scan = kernels.kernel_scan if kernels else reference_scan
    weights = Weights(
        mixer.conv1d_weight.squeeze(1),
        mixer.conv1d_bias,
        mixer.dt_bias.float(),
        -torch.exp(mixer.A_log.float()),
        mixer.D.view(-1, mixer.headdim) if mixer.D_has_hdim else mixer.D,
    )
    sizes = Sizes(mixer.chunk_size, mixer.headdim, mixer.ngroups_local_tp)
    y = scan(projected, weights, sizes, plan, tokens.cp_group)
    y = plan.whole(y).transpose(0, 1).contiguous()
    if mixer.rmsnorm:
        y = mixer.norm(y)
    return tokens.project_out(y, packed, plan, mixer.out_proj)


def reference_scan(
    projected: Tensor,
    weights: Weights,
    sizes: Sizes,
    plan: RecurrencePlan,
    group: dist.ProcessGroup,
) -> Tensor:
    """Run convolution, scan and gate of this rank's tokens in plain PyTorch; a collective.

    Args:
        projected: z, x, B, C and dt concatenated, ``[links, L, 2·H·P + 2·G·N + H]``.

    Returns:
        ``[links, L, H·P]``, gated but not yet normalised.
    """
    inner, heads = len(weights.A) * sizes.headdim, len(weights.A)
    channels, width = weights.conv.shape
    xBC = projected.split([inner, channels, heads], dim=-1)[1]
    past = exchange_halo(xBC, width - 1, plan, group)
    return mamba_split_conv1d_scan_combined(
        projected,
        *weights,
        sizes.chunk,
        seq_idx=plan.seq_idx,
        headdim=sizes.headdim,
        ngroups=sizes.ngroups,
        conv_initial_states=past.transpose(1, 2),
        enter=lambda state, decay: carry_state(state, decay, plan, group),
    )
