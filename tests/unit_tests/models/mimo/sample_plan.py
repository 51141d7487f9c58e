# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plans of microbatches whose samples no rank shares with another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch.distributed as dist

from megatron.core.models.mimo.bridge.batch_plan import BatchPlan
from megatron.core.models.mimo.bridge.plan import AtomRows
from megatron.core.models.mimo.bridge.topology import BridgeTopology
from megatron.core.token_layout import PaddedLengths, zigzag_owners


def plan_of(
    ids: Sequence[np.ndarray],
    padded: Sequence[int],
    token_ids: Mapping[str, int],
    topologies: Mapping[str, BridgeTopology],
    encoded: Mapping[str, range],
    consumed: range,
) -> BatchPlan:
    """This rank's plan of one microbatch.

    Args:
        ids, padded: tokens of all samples that cross the bridge at once, and their padded lengths.
        token_ids, topologies: token and bridge of each modality.
        encoded, consumed: places of the microbatch's samples among them.
    """
    rank = dist.get_rank()

    def rows(name: str, run: range, places: range) -> AtomRows:
        topology = topologies[name]
        assert len(ids) % topology.atoms == 0
        is_row = [ids[place] == token_ids[name] for place in places]
        atom = np.array(places, dtype=np.int64) * topology.atoms // len(ids) - run.start
        counts = np.bincount(atom, [tokens.sum() for tokens in is_row], len(run)).astype(int)
        lengths = PaddedLengths(tuple(map(len, is_row)), tuple(padded[p] for p in places))
        owners = zigzag_owners(lengths, topology.dest_cp)[
            np.concatenate([np.empty(0, bool), *is_row])
        ]
        return AtomRows(counts, owners if topology.dest_cp > 1 else None)

    return BatchPlan(
        {name: rows(name, t.encodes(rank), encoded[name]) for name, t in topologies.items()},
        {name: rows(name, t.consumes(rank), consumed) for name, t in topologies.items()},
        tuple(len(ids[place]) for place in consumed),
    )
