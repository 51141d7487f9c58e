# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Padded token numbering, which all layouts of a batch share, and the copy of plans to a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True)
class PaddedLengths:
    """Real and padded length of each sample along one token dimension, in tokens.

    A uniform ``[S, B]`` batch is one sample of length S whose tokens are rows of B; a packed
    batch (``thd``) has as many samples as ``cu_seqlens`` has intervals. Padding follows the real
    tokens of its sample, so with a causal mask no real token sees it. Global token numbers, in
    layouts and routes alike, count padded tokens.
    """

    real: tuple[int, ...]
    padded: tuple[int, ...]

    def __post_init__(self):
        fits = len(self.real) == len(self.padded) and all(
            0 <= real <= padded for real, padded in zip(self.real, self.padded, strict=True)
        )
        if not fits:
            raise ValueError(
                "padded lengths must cover the real ones, sample by sample; got "
                f"real={self.real}, padded={self.padded}"
            )

    @classmethod
    def of_packed(cls, packed_seq_params: PackedSeqParams) -> PaddedLengths:
        """Lengths of a packed batch, cached on ``packed_seq_params``.

        The first call reads ``cu_seqlens`` back to the host; all layers of the batch reuse them.
        """
        kept = vars(packed_seq_params)
        if "_padded_lengths" not in kept:
            real = packed_seq_params.cu_seqlens_q
            padded = packed_seq_params.cu_seqlens_q_padded
            padded = real if padded is None else padded
            lengths = (tuple(cu_seqlens.diff().tolist()) for cu_seqlens in (real, padded))
            kept["_padded_lengths"] = cls(*lengths)
        return kept["_padded_lengths"]

    @staticmethod
    def note(packed_seq_params: PackedSeqParams, lengths: Iterable[int]) -> None:
        """Cache known lengths of unpadded samples, so that :meth:`of_packed` need not read them."""
        known = tuple(lengths)
        vars(packed_seq_params)["_padded_lengths"] = PaddedLengths(known, known)

    @property
    def total(self) -> int:
        """Number of tokens, padding included."""
        return sum(self.padded)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Boundaries of the real samples, int32 [samples + 1]."""
        return torch.tensor([0, *accumulate(self.real)], dtype=torch.int32)

    @cached_property
    def cu_seqlens_padded(self) -> Tensor:
        """Boundaries of the padded samples, int32 [samples + 1]."""
        return torch.tensor([0, *accumulate(self.padded)], dtype=torch.int32)

    @cached_property
    def samples(self) -> Tensor:
        """Sample of each padded token, int32 [total]."""
        ends = self.cu_seqlens_padded[1:]
        tokens = torch.arange(self.total, dtype=torch.int32)
        return torch.searchsorted(ends, tokens, right=True, out_int32=True)

    @cached_property
    def valid(self) -> Tensor:
        """True where a padded token is a real one, bool [total]."""
        ends = self.cu_seqlens_padded[:-1] + torch.tensor(self.real, dtype=torch.int32)
        return torch.arange(self.total) < ends.index_select(0, self.samples)

    def pad(self, tensor: Tensor, dim: int = 0, value: float = 0) -> Tensor:
        """Insert padding ``value``: ``[..., sum(real), ...]`` to ``[..., total, ...]``."""
        shape = list(tensor.shape)
        shape[dim] = self.total
        real_tokens = copied_to(tensor.device, self.valid.nonzero().squeeze(1))
        return tensor.new_full(shape, value).index_copy(dim, real_tokens, tensor)

    def packed_seq_params(self, device: torch.device | str) -> PackedSeqParams:
        """The ``thd`` description of this batch, with global lengths, for Megatron's layers.

        Neither this method nor :meth:`of_packed` of its result waits for the device.
        """
        longest = max(self.padded, default=0)
        cu_seqlens = copied_to(device, self.cu_seqlens)
        cu_seqlens_padded = copied_to(device, self.cu_seqlens_padded)
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens_padded,
            cu_seqlens_kv_padded=cu_seqlens_padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            seq_idx=copied_to(device, self.samples)[None],
            # Whether padding shifts the start of a sample; TE would compare on the device.
            pad_between_seqs=self.real[:-1] != self.padded[:-1],
        )
        params.total_tokens = self.total  # given above, it would compute seq_idx on the device
        vars(params)["_padded_lengths"] = self
        return params


def pad_lengths(
    lengths: Iterable[int], cp_size: int, sequence_parallel_size: int = 1
) -> PaddedLengths:
    """Pad each sample to a multiple of 2·cp_size, so that zigzag halves are equal.

    With one CP rank there is nothing to halve, so samples are not padded for it. The last sample is
    padded further until ``sequence_parallel_size`` (the TP size with sequence parallelism, else 1)
    divides every rank's shard.
    """
    real = tuple(int(length) for length in lengths)
    multiple = 2 * cp_size if cp_size > 1 else 1
    padded = [-(-length // multiple) * multiple for length in real]
    if padded:
        padded[-1] += -sum(padded) % (multiple * sequence_parallel_size)
    return PaddedLengths(real, tuple(padded))


def lengths_of_batch(packed_seq_params: PackedSeqParams | None, total: int) -> PaddedLengths:
    """Lengths of the batch whose ``total`` padded tokens the CP ranks hold together.

    Without boundaries the batch is one sample, with a row of B tokens at each place.

    Raises:
        ValueError: the boundaries describe another number of tokens.
    """
    if packed_seq_params is None or packed_seq_params.cu_seqlens_q is None:
        return PaddedLengths((total,), (total,))
    lengths = PaddedLengths.of_packed(packed_seq_params)
    if lengths.total != total:
        raise ValueError(
            f"the cu_seqlens of PackedSeqParams end at {lengths.total}, which does not match the "
            f"{total} tokens that the CP ranks hold; they count those of all ranks, with padding"
        )
    return lengths


def copied_to(device: torch.device | str, tensor: Tensor) -> Tensor:
    """Copy a host tensor to ``device`` without making the host wait.

    The copy is made from pinned memory: CUDA copies 64 KiB or more of unpinned memory only after
    all earlier work of the stream, for which the host would wait.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
