# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Groups, packing and padding of a language model's batch that a ``PartitionAdapter`` shards."""

from collections.abc import Callable, Iterable

import torch
from torch.distributed import ProcessGroup

from megatron.core.models.mimo.config import MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY
from megatron.core.models.mimo.partition.adapter import PartitionAdapter
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.token_layout import PaddedLengths
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model


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


def token_arguments(
    model: MegatronModule,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None,
    loss_mask: torch.Tensor | None,
    packed_seq_params: PackedSeqParams | None = None,
) -> dict[str, torch.Tensor | None]:
    """Return a language model's keyword arguments of tokens, beside its hidden states and labels.

    Only multi-token prediction (MTP) looks up tokens in the language model, in training on the last
    stage. It adds the embedding of the next token to each hidden state. The last stage has no row
    of an image or sound, so predictions from such a token get no loss.

    Args:
        input_ids, position_ids, loss_mask: ``[B, S]``.
        packed_seq_params: parameters of a packed batch, with global ``cu_seqlens``; B is 1.

    Returns:
        ``input_ids``, ``position_ids`` and, if tokens are padded, ``padding_mask``. For MTP also
        the ``loss_mask``, and ``input_ids`` as this CP rank has them, ``[B, S/cp]``; it knows no
        positions. Otherwise ``input_ids`` is None and ``position_ids`` are whole.

    Raises:
        ValueError: with MTP, a sample has to be padded.
    """
    adapter = model.partition_adapter
    padding = padding_arguments(input_ids, adapter, packed_seq_params)
    has_mtp = getattr(unwrap_model(model.language_model), "mtp_process", False)
    if not (has_mtp and torch.is_grad_enabled()):
        return {"input_ids": None, "position_ids": position_ids, **padding}
    if padding:
        raise ValueError("multi-token prediction takes no samples that CP or TP has to pad")
    for token_id in model.special_token_ids.values():
        loss_mask = loss_mask.masked_fill(input_ids == token_id, 0)
    if adapter is not None:
        lengths = adapter.lengths(input_ids.size(1), packed_seq_params)
        input_ids, loss_mask = (adapter.shard_tokens(t, lengths) for t in (input_ids, loss_mask))
    return {"input_ids": input_ids, "position_ids": None, "loss_mask": loss_mask}


def with_tokens(module: MegatronModule, tokens: dict[str, torch.Tensor | None]) -> Callable:
    """Return a call of a language model in which these arguments replace the caller's."""
    return lambda **others: module(**others | tokens)
