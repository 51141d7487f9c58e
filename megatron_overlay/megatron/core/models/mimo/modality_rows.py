# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which rows of a modality's embeddings a batch has, and which ranks use them; all on the host.

Token ids say so. A batch that brings them in host memory too is planned without waiting for a
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from megatron.core.models.mimo.comm.sample_rows import SampleRows
from megatron.core.models.mimo.partition.adapter import PartitionAdapter
from megatron.core.packed_seq_params import PackedSeqParams


class HostTokens(NamedTuple):
    """Token ids of one microbatch in host memory, int64 ``[S]`` of each sample.

    Args:
        encoded: by modality, the samples of what its encoder takes on this rank.
        consumed: samples that this rank's language model takes, in order. Packed ones are given one
            by one, with the padding that the loader has put behind each.
        atoms: by modality, rows of each of the bridge's atoms that this rank encodes, and of each
            that it consumes, in this microbatch; None: atoms are equal runs of samples. With them
            a rank may encode a part of a sample's rows: ``encoded`` then has the whole sample,
            with another token in place of those that others encode.
    """

    encoded: Mapping[str, Sequence[Tensor]]
    consumed: Sequence[Tensor]
    atoms: Mapping[str, tuple[Sequence[int], Sequence[int]]] | None = None


class Tokens(NamedTuple):
    """A microbatch as the language model on this rank sees it: which rows go where.

    Args:
        input_ids: int64 ``[B, S]``.
        packed_seq_params: of a packed microbatch, with global ``cu_seqlens``; B is 1.
        host: the same ids, and those of the samples that this rank encodes; None where the batch
            did not bring them.
    """

    input_ids: Tensor
    packed_seq_params: PackedSeqParams | None = None
    host: HostTokens | None = None

    def consumed_ids(self) -> list[np.ndarray]:
        """Ids of each sample, or of each row; without ``host`` it waits for the device."""
        if self.host is None:
            return list(self.input_ids.cpu().numpy())
        return [ids.numpy() for ids in self.host.consumed]


def row_counts(microbatches: Sequence[Tokens], token_id: int) -> list[int]:
    """Rows that the language model takes for each microbatch."""
    return [
        sum(np.count_nonzero(ids == token_id) for ids in tokens.consumed_ids())
        for tokens in microbatches
    ]


def consumed_rows(
    microbatches: Sequence[Tokens], name: str, token_id: int, adapter: PartitionAdapter | None
) -> SampleRows:
    """Rows of the samples that this rank's language model takes, or of the atoms.

    Args:
        microbatches: all that are handed over at once, in order.
        name: of the modality.
        token_id: of the modality; its rows replace these tokens in their order.
        adapter: of the language model; None where nothing is sharded.
    """
    counts, rows = [], []
    for tokens in microbatches:
        samples = tokens.consumed_ids()
        counts += [np.count_nonzero(ids == token_id) for ids in samples]
        packed = tokens.packed_seq_params
        samples = samples if packed is None else [np.concatenate(samples)]
        rows += [(ids, packed) for ids in samples]
    return SampleRows(_in_atoms(microbatches, name, 1) or counts, _owners(rows, token_id, adapter))


def encoded_rows(
    microbatches: Sequence[Tokens], name: str, token_id: int, adapter: PartitionAdapter | None
) -> SampleRows | None:
    """Rows of modality ``name`` that this rank encodes; None where the batch does not tell.

    Their owners are those of unpacked samples of the same length, which packed ones have too where
    the loader has padded each to what CP and SP divide, as a batch with atoms does. Else, what
    others pack in a row is not known here, and there are no owners.

    The other arguments are those of :func:`consumed_rows`.
    """
    if any(tokens.host is None for tokens in microbatches):
        return None
    samples = [ids.numpy() for tokens in microbatches for ids in tokens.host.encoded[name]]
    atoms = _in_atoms(microbatches, name, 0)
    if atoms is None and any(tokens.packed_seq_params is not None for tokens in microbatches):
        return SampleRows([np.count_nonzero(ids == token_id) for ids in samples])
    counts = atoms or [np.count_nonzero(ids == token_id) for ids in samples]
    return SampleRows(counts, _owners([(ids, None) for ids in samples], token_id, adapter))


def _in_atoms(microbatches: Sequence[Tokens], name: str, side: int) -> list[int] | None:
    """Rows of each atom that the rank encodes (``side`` 0) or consumes (1), of all microbatches."""
    told = [tokens.host and tokens.host.atoms for tokens in microbatches]
    if None in told:
        return None
    return [sum(counts) for counts in zip(*(atoms[name][side] for atoms in told), strict=True)]


def _owners(
    rows: Sequence[tuple[np.ndarray, PackedSeqParams | None]],
    token_id: int,
    adapter: PartitionAdapter | None,
) -> np.ndarray | None:
    """CP rank that holds each of the rows' tokens of a modality; None without CP."""
    if adapter is None or not adapter.cfg.use_cp:
        return None
    owners = [np.zeros(0, dtype=np.int64)]
    for ids, packed in rows:
        owners.append(adapter.owners(len(ids), packed).numpy()[ids == token_id])
    return np.concatenate(owners)
