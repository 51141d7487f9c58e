# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Packed rows: several sequences end to end in one row, with a sequence index for each token."""

import torch
from torch import Tensor


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
