# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Groups, packing and padding of a language model's batch that a ``PartitionAdapter`` shards."""

from collections.abc import Iterable

import torch
from torch.distributed import ProcessGroup

from megatron.core.models.mimo.config import MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.models.mimo.partition.adapter import PartitionAdapter
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.token_layout import PaddedLengths


def partition_groups(
    config: MimoModelConfig, cp_group: ProcessGroup | None, tp_group: ProcessGroup | None
) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Return the CP and TP group of the language model; its grid supplies a group that is None.

    Args:
        config: configuration of the model. Without grids, None stays None and means the global
            group.
    """
    if not config.module_to_grid_map:
        return cp_group, tp_group
    grid = config.module_to_grid_map[MIMO_LANGUAGE_MODULE_KEY]
    if cp_group is None and "cp" in grid.dim_names:
        cp_group = grid.get_pg("cp")
    return cp_group, tp_group or grid.get_pg("tp")


def packed_parameters(
    packing: dict | PackedSeqParams | None, lengths: Iterable[int] | None = None
) -> PackedSeqParams | None:
    """Return the packed parameters from a batch's ``packing_kwargs``; the boundaries become int32.

    Args:
        packing: keyword arguments of ``PackedSeqParams``, or a finished ``PackedSeqParams``.
        lengths: tokens of each packed sample, so that the boundaries need not be read back from the
            device.
    """
    if packing is None or isinstance(packing, PackedSeqParams):
        return packing
    bounds = {
        name: value.to(torch.int32)
        for name, value in packing.items()
        if "cu_seqlens" in name and value is not None
    }
    packed = PackedSeqParams(**packing | bounds | {"qkv_format": "thd"})
    if lengths is not None and packed.cu_seqlens_q_padded is None:
        PaddedLengths.note(packed, lengths)
    return packed


def padding_arguments(
    input_ids: torch.Tensor,
    adapter: PartitionAdapter | None,
    packed_seq_params: PackedSeqParams | None = None,
) -> dict[str, torch.Tensor]:
    """Return keyword arguments that tell experts which tokens ``adapter`` has added as padding.

    Padding is routed to experts, but counts neither in balancing losses nor in the expert bias.

    Args:
        input_ids: ``[B, S]``.
        adapter: the language model's adapter; None where nothing is sharded.
        packed_seq_params: parameters of a packed batch, with global ``cu_seqlens``; B is 1.

    Returns:
        ``padding_mask``, bool ``[B, padded/(cp·tp)]``, sharded as the embeddings and true at
        padding; an empty dict without padding.
    """
    if adapter is None:
        return {}
    lengths = adapter.lengths(input_ids.size(1), packed_seq_params)
    if lengths.real == lengths.padded:
        return {}
    tokens = torch.zeros_like(input_ids, dtype=torch.bool)
    mask = adapter.shard_tokens(tokens, lengths, pad=True)
    if adapter.cfg.seq_parallel:
        mask = mask.chunk(adapter.cfg.sp_size, dim=1)[adapter.cfg.tp_group.rank()]
    return {"padding_mask": mask}
