# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Shard a batch of the language model for context (CP) and sequence parallelism (SP).

Context parallelism splits every sample over the CP ranks in the zigzag token layout of
``megatron.core.token_layout``; sequence parallelism then splits the embeddings of a
CP rank over its tensor-parallel (TP) ranks. Labels and masks follow CP alone: the output layer
gathers the sequence over TP before the loss.
"""

import torch

from megatron.core.models.mimo.partition import utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.token_layout import (
    PaddedLengths,
    lengths_of_batch,
    pad_lengths,
    zigzag_layout,
)


class PartitionConfig(utils.PartitionConfig):
    """Settings that decide how batches are sharded; made by ``from_mp_config``."""

    @property
    def cp_size(self) -> int:
        """Number of CP ranks that a sample is split over."""
        return self.cp_group.size() if self.use_cp else 1

    @property
    def sp_size(self) -> int:
        """Number of TP ranks that the embeddings of one CP rank are split over."""
        return self.tp_group.size() if self.seq_parallel else 1


class PartitionAdapter(utils.PartitionAdapter):
    """Cut a batch down to this rank's tokens.

    A sequence whose length does not divide is padded, never truncated or refused: see ``lengths``.
    Packed samples need no Transformer Engine.
    """

    def lengths(
        self, seq_length: int, packed_seq_params: PackedSeqParams | None = None
    ) -> PaddedLengths:
        """Return real and padded sample lengths along the sequence dimension.

        Packed boundaries are read back to the host once per batch. If the loader has padded the
        samples already (``cu_seqlens_q_padded``), its padding counts as tokens.

        Raises:
            ValueError: the packed samples do not cover ``seq_length`` tokens, or TP communication
                overlap is on and was set up for another sequence length.
        """
        if self.cfg.tp_comm_overlap and seq_length != self.cfg.max_seq_len:
            raise ValueError(
                f"TP communication overlap needs sequences of {self.cfg.max_seq_len} tokens, "
                f"found {seq_length}"
            )
        packed = packed_seq_params if _is_packed(packed_seq_params) else None
        samples = lengths_of_batch(packed, seq_length).padded
        return pad_lengths(samples, self.cfg.cp_size, self.cfg.sp_size)

    def shard_tokens(
        self, tensor: torch.Tensor, lengths: PaddedLengths, dim: int = 1, pad: float = 0
    ) -> torch.Tensor:
        """Cut ``tensor`` to this CP rank's tokens: ``[B, S, ...]`` to ``[B, padded/cp, ...]``."""
        if lengths.real != lengths.padded:
            tensor = lengths.pad(tensor, dim, pad)
        if not self.cfg.use_cp:
            return tensor
        layout = zigzag_layout(lengths, self.cfg.cp_size)
        return layout.shard(tensor, self.cfg.cp_group.rank(), dim)

    def shard_embeddings(self, embeddings: torch.Tensor, lengths: PaddedLengths) -> torch.Tensor:
        """Shard embeddings ``[S, B, H]`` to ``[padded/(cp·tp), B, H]``; without SP only over CP."""
        embeddings = self.shard_tokens(embeddings, lengths, dim=0)
        if self.cfg.seq_parallel:
            embeddings = scatter_to_sequence_parallel_region(
                embeddings.contiguous(), group=self.cfg.tp_group
            )
        return embeddings

    def shard(
        self,
        embeddings: torch.Tensor | None,
        labels: torch.Tensor | None,
        loss_mask: torch.Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[
        torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, PackedSeqParams | None
    ]:
        """Shard a whole batch; every tensor may be None, as on later pipeline stages.

        Position ids stay whole: rotary embeddings pick out their CP rank's part themselves.

        Args:
            embeddings: ``[S, B, H]``.
            labels, loss_mask: ``[B, S]``; padding gets 0, so it bears no loss.
            packed_seq_params: parameters of a packed batch, with global ``cu_seqlens``; B is 1.

        Returns:
            The same four: embeddings ``[padded/(cp·tp), B, H]``, labels and loss mask
            ``[B, padded/cp]``, and the packed parameters with padded boundaries.

        Raises:
            ValueError: labels have to be padded, and there is no loss mask to exclude the padding.
        """
        lengths = self._lengths_of(embeddings, labels, loss_mask, packed_seq_params)
        if lengths is None:
            return embeddings, labels, loss_mask, packed_seq_params
        if lengths.real != lengths.padded and labels is not None and loss_mask is None:
            raise ValueError(
                f"samples of {lengths.real} tokens are padded to {lengths.padded}: give a loss_mask"
            )
        if embeddings is not None:
            embeddings = self.shard_embeddings(embeddings, lengths)
        labels, loss_mask = (
            None if tensor is None else self.shard_tokens(tensor, lengths)
            for tensor in (labels, loss_mask)
        )
        if _is_packed(packed_seq_params):
            packed_seq_params = lengths.packed_seq_params(packed_seq_params.cu_seqlens_q.device)
        return embeddings, labels, loss_mask, packed_seq_params

    def _lengths_of(
        self,
        embeddings: torch.Tensor | None,
        labels: torch.Tensor | None,
        loss_mask: torch.Tensor | None,
        packed_seq_params: PackedSeqParams | None,
    ) -> PaddedLengths | None:
        """Sample lengths of a batch; None if there is nothing to shard."""
        sized = ((embeddings, 0), (labels, 1), (loss_mask, 1))
        length = next((tensor.size(dim) for tensor, dim in sized if tensor is not None), None)
        if length is None and _is_packed(packed_seq_params):
            length = sum(PaddedLengths.of_packed(packed_seq_params).padded)
        return None if length is None else self.lengths(length, packed_seq_params)


def _is_packed(packed_seq_params: PackedSeqParams | None) -> bool:
    return packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
