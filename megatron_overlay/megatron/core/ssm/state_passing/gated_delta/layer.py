# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Gated delta net that passes states: every rank has all heads of its own tokens."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.ops.reference import causal_conv1d_fn, chunk_gated_delta_rule
from megatron.core.ssm.state_passing.gpu_kernels import gpu_kernels
from megatron.core.ssm.state_passing.layer_tokens import exchange_halo
from megatron.core.ssm.state_passing.scan_over_ranks import carry_state
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.token_layout.recurrence_plan import RecurrencePlan


def forward(layer, hidden_states: Tensor, inference_context, packed: PackedSeqParams | None):
    """Run a training forward of upstream's ``GatedDeltaNet``; a collective.

    Args:
        layer: a layer with ``layer_tokens``, whose parameters are those of one TP rank, not split
            over CP.
        hidden_states: ``[S/(cp·sp), B, H]``.
        packed: parameters of a packed batch, with global ``cu_seqlens``; B is 1.

    Returns:
        Output ``[S/(cp·sp), B, H]`` and bias, as from the layer's own forward.

    Raises:
        ValueError: there is an inference context, the activation is not SiLU, or the tokens do not
            divide over the ranks.
    """
    tokens = layer.layer_tokens
    if inference_context is not None:
        raise ValueError(
            f"inference takes cp=1; this gated delta net passes states over cp={tokens.cp_size}"
        )
    if layer.activation not in ("silu", "swish"):
        raise ValueError(
            f"state passing takes a gated delta net whose activation is silu, not "
            f"{layer.activation}; SiluGatedDeltaNet has it whatever the MLPs have"
        )
    plan = tokens.recurrence(hidden_states, packed)
    heads = layer.num_value_heads // layer.tp_size
    widths = [2 * layer.qk_dim_local_tp + layer.v_dim_local_tp, layer.v_dim_local_tp, heads, heads]
    projected = tokens.project_in(hidden_states, packed, plan, layer.in_proj)
    batch, length = projected.shape[:2]
    qkv, gate, beta, alpha = projected.split(widths, dim=-1)
    on_kernels = qkv.is_cuda and not layer.config.deterministic_mode
    qkv = _convolve(qkv, layer.conv1d, plan, tokens.cp_group, on_kernels)
    gate = gate.reshape(batch, length, heads, -1)
    query, key, value, gate, g, beta = _inputs(layer, qkv, gate, beta, alpha)
    kernels = gpu_kernels("gated_delta.kernels") if on_kernels else None
    rule = kernels.kernel_rule if kernels and kernels.takes(key) else reference_rule
    y = rule(query, key, value, g, beta, plan, tokens.cp_group)
    norm = partial(_norm, layer, plan)
    again = CheckpointWithoutOutput(layer.config.fp8) if layer.recompute_norm_out else None
    y = again.checkpoint(norm, y, gate) if again else norm(y, gate)
    out, bias = tokens.project_out(y, packed, plan, layer.out_proj)
    if again:
        again.discard_output_and_register_recompute(out)
    return out, bias


def _inputs(layer, qkv: Tensor, gate: Tensor, beta: Tensor, alpha: Tensor) -> tuple[Tensor, ...]:
    """Query, key, value, gate, log decay and writing strength, by the layer's own methods."""
    sizes, decay = qkv.shape[:2], (layer.A_log, layer.dt_bias)
    if hasattr(layer, "_compute_gates"):  # upstream's main
        made = layer._prepare_input_for_gated_delta_rule(qkv, gate, *decay, *sizes, beta, alpha)
        return tuple(made[name] for name in ("q", "k", "v", "gate", "g", "beta"))
    *made, beta, alpha = layer._prepare_input_for_gated_delta_rule(qkv, gate, *sizes, beta, alpha)
    g, beta = layer._compute_g_and_beta(*decay, alpha, beta)
    return *made, g, beta


def _norm(layer, plan: RecurrencePlan, y: Tensor, gate: Tensor) -> Tensor:
    """Gated norm of ``y [links, L, H, V]``, transposed to ``[S/cp, B, H·V]``."""
    normed = layer._apply_gated_norm(y, gate).reshape(*y.shape[:2], -1)
    return plan.whole(normed).transpose(0, 1).contiguous()


def reference_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    plan: RecurrencePlan,
    group: dist.ProcessGroup,
) -> Tensor:
    """Apply the gated delta rule to this rank's tokens in plain PyTorch; a collective.

    Args:
        query, key: ``[links, L, H, K]``. value: ``[links, L, H, V]``.
        g: log decay. beta: writing strength. Both ``[links, L, H]``.

    Returns:
        ``[links, L, H, V]``.
    """
    return chunk_gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        seq_idx=plan.seq_idx,
        enter=lambda state, matrix: carry_state(state, matrix, plan, group),
    )[0]


def _convolve(
    x: Tensor, conv, plan: RecurrencePlan, group: dist.ProcessGroup, on_kernels: bool
) -> Tensor:
    """``silu(conv(x))`` of ``x [links, L, D]`` by the layer's depthwise convolution."""
    weight = conv.weight.squeeze(1)
    # The kernels need a multiple of 8 channels.
    kernels = gpu_kernels("kernel_conv") if on_kernels and x.shape[2] % 8 == 0 else None
    if kernels:
        return kernels.HaloConv.apply(x, weight, conv.bias, plan, group)
    past = exchange_halo(x, weight.shape[1] - 1, plan, group)
    return causal_conv1d_fn(
        x.transpose(1, 2),
        weight,
        conv.bias,
        plan.seq_idx,
        initial_states=past.transpose(1, 2),
        activation="silu",
    ).transpose(1, 2)
