# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a batch of the language model looks like once a ``PartitionAdapter`` has cut it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron.core.context_parallel_layout import PaddedLengths
from megatron.core.models.mimo.partition.utils import PartitionAdapter
from megatron.core.packed_seq_params import PackedSeqParams

if TYPE_CHECKING:
    from megatron.core.models.mimo.modality_rows import HostTokens


def shard_language_batch(
    adapter: PartitionAdapter | None,
    embeddings: torch.Tensor | None,
    labels: torch.Tensor | None,
    loss_mask: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """What a rank of the language model takes of a batch, on any pipeline stage.

    Position ids stay whole: rotary embeddings pick out their CP rank's part themselves.

    Args:
        adapter: of the language model; None where nothing is sharded.
        embeddings: ``[S, B, H]``; None on later stages, which receive hidden states.
        labels, loss_mask: ``[B, S]`` or None.

    Returns:
        The same three: ``[padded/(cp·tp), B, H]``, ``[B, padded/cp]``, ``[B, padded/cp]``.

    Raises:
        ValueError: as ``PartitionAdapter.shard``.
    """
    if adapter is None:
        return embeddings, labels, loss_mask
    rows = None if embeddings is None else embeddings.transpose(0, 1)
    rows, labels, loss_mask, _, _ = adapter.shard(rows, labels, loss_mask, None)
    return None if rows is None else rows.transpose(0, 1).contiguous(), labels, loss_mask


def packed_parameters(
    packing: dict | PackedSeqParams | None, host: HostTokens | None = None
) -> PackedSeqParams | None:
    """Packed parameters from a batch's ``packing_kwargs``; the boundaries become int32.

    Args:
        packing: keyword arguments of ``PackedSeqParams``, or made of them already.
        host: tokens of the packed samples, whose lengths are then known without a look at the
            boundaries.
    """
    if packing is None or isinstance(packing, PackedSeqParams):
        return packing
    bounds = {
        name: value.to(torch.int32)
        for name, value in packing.items()
        if "cu_seqlens" in name and value is not None
    }
    packed = PackedSeqParams(**packing | bounds | {"qkv_format": "thd"})
    if host is not None and packed.cu_seqlens_q_padded is None:
        PaddedLengths.note(packed, [len(ids) for ids in host.consumed])
    return packed


def padding_arguments(
    input_ids: torch.Tensor,
    adapter: PartitionAdapter,
    packed_seq_params: PackedSeqParams | None = None,
) -> dict[str, torch.Tensor]:
    """What tells a language model's experts which tokens ``adapter`` has added as padding.

    They are routed, but count neither for the load-balancing losses nor for the expert bias.

    Args:
        input_ids: ``[B, S]``.
        packed_seq_params: of a packed batch, with global ``cu_seqlens``; B is 1.

    Returns:
        ``padding_mask``, bool ``[B, padded/(cp·tp)]`` as the embeddings are sharded, true at
        padding; nothing where there is none.
    """
    lengths = adapter.lengths(input_ids.size(1), packed_seq_params)
    if lengths.real == lengths.padded:
        return {}
    tokens = torch.zeros_like(input_ids, dtype=torch.bool)
    mask = adapter.shard_tokens(tokens, lengths, pad=True)
    if adapter.cfg.seq_parallel:
        mask = mask.chunk(adapter.cfg.sp_size, dim=1)[adapter.cfg.tp_group.rank()]
    return {"padding_mask": mask}
