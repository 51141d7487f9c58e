# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""One rank's rows of a batch, in host memory: the loader plans them, the bridge routes by them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.core.models.mimo.bridge.plan import AtomRows


@dataclass(frozen=True)
class BatchPlan:
    """Rows of one microbatch; with it, nothing that plans the exchange waits for a device.

    Args:
        encoded, consumed: by modality, rows of the atoms that this rank encodes, and of those that
            its DP index of the language model consumes (on all pipeline stages alike). Atoms are
            those of all microbatches that cross the bridge at once. With CP both have owners.
        lengths: tokens of each packed sample, in order; None if the microbatch is not packed.
    """

    encoded: Mapping[str, AtomRows]
    consumed: Mapping[str, AtomRows]
    lengths: tuple[int, ...] | None = None


class BridgeRows(NamedTuple):
    """One modality's rows that cross the bridge at once, on one rank.

    Args:
        encoded, consumed: rows of the atoms that the rank encodes and consumes.
        by_microbatch: number of rows that the language model consumes in each microbatch.
    """

    encoded: AtomRows
    consumed: AtomRows
    by_microbatch: list[int]


def planned_rows(plans: Sequence[BatchPlan], name: str) -> BridgeRows:
    """Join the plans of the microbatches that cross the bridge at once, for one modality."""
    encoded, consumed = ([getattr(p, s)[name] for p in plans] for s in ("encoded", "consumed"))
    by_microbatch = [int(np.sum(rows.counts)) for rows in consumed]
    return BridgeRows(_joined(encoded), _joined(consumed), by_microbatch)


def _joined(parts: Sequence[AtomRows]) -> AtomRows:
    owners = [rows.owners for rows in parts]
    known = all(part is not None for part in owners)
    return AtomRows(
        np.sum([rows.counts for rows in parts], axis=0), np.concatenate(owners) if known else None
    )
