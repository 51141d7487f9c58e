# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Count a batch's rows of each modality and find the ranks that use them, on the host.

Both follow from the token ids. A batch that also brings its ids in host memory is planned without
waiting for a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from megatron.core.models.mimo.bridge.sample_rows import SampleRows
from megatron.core.models.mimo.partition.adapter import PartitionAdapter
from megatron.core.packed_seq_params import PackedSeqParams


class HostTokens(NamedTuple):
    """Token ids of one microbatch in host memory, int64 ``[S]`` for each sample.

    Args:
        encoded: by modality, the samples whose inputs this rank encodes.
        consumed: the samples that this rank's language model consumes, in order. Packed samples are
            given one by one, each with the padding that the loader has appended.
        atoms: by modality, row counts in this microbatch of the bridge's atoms that this rank
            encodes, and of those that it consumes; None if atoms are equal runs of samples. With
            ``atoms`` a rank may encode a part of a sample's rows: ``encoded`` then has the whole
            sample, with another token id in place of those that other ranks encode.
    """

    encoded: Mapping[str, Sequence[Tensor]]
    consumed: Sequence[Tensor]
    atoms: Mapping[str, tuple[Sequence[int], Sequence[int]]] | None = None


class Tokens(NamedTuple):
    """Token ids of a microbatch, from which the bridge plans which rows go where.

    Args:
        input_ids: int64 ``[B, S]``, as this rank's language model takes them.
        packed_seq_params: parameters of a packed microbatch, with global ``cu_seqlens``; B is 1.
        host: the same ids in host memory, and those of the samples that this rank encodes; None if
            the batch did not bring them.
    """

    input_ids: Tensor
    packed_seq_params: PackedSeqParams | None = None
    host: HostTokens | None = None

    def consumed_ids(self) -> list[np.ndarray]:
        """Ids of each sample; without ``host`` those of each row, read back from the device."""
        if self.host is None:
            return list(self.input_ids.cpu().numpy())
        return [ids.numpy() for ids in self.host.consumed]


def row_counts(microbatches: Sequence[Tokens], token_id: int) -> list[int]:
    """Number of rows that the language model consumes in each microbatch."""
    return [
        sum(np.count_nonzero(ids == token_id) for ids in tokens.consumed_ids())
        for tokens in microbatches
    ]


def consumed_rows(
    microbatches: Sequence[Tokens], name: str, token_id: int, adapter: PartitionAdapter | None
) -> SampleRows:
    """Row counts of the samples, or of the atoms, that this rank's language model consumes.

    Args:
        microbatches: all microbatches whose rows cross the bridge at once, in order.
        name: name of the modality.
        token_id: the modality's special token; its rows replace these tokens in their order.
        adapter: the language model's adapter; None where nothing is sharded.
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
    """Row counts of the samples, or of the atoms, that this rank encodes of modality ``name``.

    Owners are computed as for unpacked samples of the same length. Packed samples have the same
    owners if the loader has padded each to a multiple that CP and SP divide, as in a batch with
    ``atoms``. For other packed batches the result has no owners, as this rank does not know which
    samples another rank packs into a row.

    Arguments are those of :func:`consumed_rows`.

    Returns:
        The counts; None if a microbatch brings no host tokens.
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
    """Row count of each atom over all microbatches; ``side`` 0: encoded, 1: consumed."""
    told = [tokens.host and tokens.host.atoms for tokens in microbatches]
    if None in told:
        return None
    return [sum(counts) for counts in zip(*(atoms[name][side] for atoms in told), strict=True)]


def _owners(
    rows: Sequence[tuple[np.ndarray, PackedSeqParams | None]],
    token_id: int,
    adapter: PartitionAdapter | None,
) -> np.ndarray | None:
    """CP rank that holds the token of each of a modality's rows, int64 [rows]; None without CP."""
    if adapter is None or not adapter.cfg.use_cp:
        return None
    owners = [np.zeros(0, dtype=np.int64)]
    for ids, packed in rows:
        owners.append(adapter.owners(len(ids), packed).numpy()[ids == token_id])
    return np.concatenate(owners)
