# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Where packed samples lie, in the form that kernels of recurrent layers take."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.token_layout import check_zigzag_lengths, copied_to, lengths_of_batch
from megatron.core.token_layout.recurrence_plan import plan_recurrence


def sample_of_each_token(packed_seq_params: PackedSeqParams, tokens: int) -> Tensor | None:
    """Sample of each token, int32 ``[1, tokens]``; a scan resets its state where it changes.

    ``tokens`` counts the whole packed row, over all CP ranks and with padding. None for a row of
    one sample. In a run of upstream's, with global groups, None also if ``seq_idx`` is missing:
    samples then share their state, as they do upstream.

    Raises:
        ValueError: ``packed_seq_params`` lacks ``seq_idx``, or describes another row.
    """
    seq_idx = packed_seq_params.seq_idx
    if seq_idx is None:
        if parallel_state.is_initialized() or len(packed_seq_params.cu_seqlens_q) == 2:
            return None
        raise ValueError(
            "packed samples need PackedSeqParams(total_tokens=…) for a Mamba layer, which would "
            f"carry its state from one sample to the next; this row has {tokens} tokens"
        )
    if seq_idx.size(-1) != tokens:
        raise ValueError(
            f"PackedSeqParams describes {seq_idx.size(-1)} tokens, the Mamba layer has {tokens}; "
            "total_tokens and cu_seqlens count the tokens of all CP ranks, with padding"
        )
    return seq_idx


def sample_starts(
    packed_seq_params: PackedSeqParams | None, tokens: int, cp_size: int, device: torch.device
) -> Tensor | None:
    """Start of each sample of a packed row, then the row's end, int32; None for a plain batch.

    Empty samples are left out, as ``fla`` confuses the samples after an empty one. In a run of
    upstream's, with global groups, they stay. ``tokens`` is as in :func:`sample_of_each_token`.

    Raises:
        ValueError: ``packed_seq_params`` describes another row, or a length (of a sample, if
            packed) is not a multiple of 2·cp_size.
    """
    is_packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
    lengths = lengths_of_batch(packed_seq_params if is_packed else None, tokens)
    check_zigzag_lengths(lengths, cp_size)
    if not is_packed:
        return None
    if parallel_state.is_initialized():
        return copied_to(device, lengths.cu_seqlens_padded)
    return plan_recurrence(lengths, 1, 0, device).cu_seqlens
