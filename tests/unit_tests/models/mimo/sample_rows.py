# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of whole samples, for the plans of batches whose samples no rank shares with another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.core.context_parallel_layout import PaddedLengths, zigzag_owners
from megatron.core.models.mimo.bridge.plan import AtomRows
from megatron.core.models.mimo.bridge.topology import BridgeTopology


def rows_of_samples(
    topology: BridgeTopology,
    run: range,
    places: Sequence[int],
    total: int,
    is_row: Sequence[np.ndarray],
    padded: Sequence[int],
) -> AtomRows:
    """Rows of whole samples.

    Args:
        topology: topology of the bridge.
        run: atoms that the rank encodes, or those that it consumes.
        places: place of each sample among the ``total`` that cross the bridge at once.
        total: number of these samples on all ranks; the number of atoms must divide it.
        is_row: for each sample, bool [its tokens], which tokens are replaced by rows.
        padded: padded length of each sample, which decides the owners of its tokens.

    Raises:
        ValueError: ``total`` is not divisible.
    """
    if total % topology.atoms:
        raise ValueError(f"{total} samples are not divisible by {topology.atoms}")
    atom = np.array(places, dtype=np.int64) * topology.atoms // total - run.start
    rows = [int(tokens.sum()) for tokens in is_row]
    counts = np.bincount(atom, rows, minlength=len(run)).astype(np.int64)
    if topology.dest_cp == 1:
        return AtomRows(counts)
    lengths = PaddedLengths(tuple(map(len, is_row)), tuple(padded))
    return AtomRows(
        counts,
        zigzag_owners(lengths, topology.dest_cp)[np.concatenate([np.zeros(0, bool), *is_row])],
    )
