# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Assign a part of the batch to each DP index of an encoder; plain data, any world size.

The destination's DP index d consumes the d-th of ``dest_dp`` equal runs of the batch, and the
source cuts the batch into ``src_dp`` equal runs, its *parts*. Any source DP index may encode any
part, so parts are assigned such that ranks encode what they consume: a rank of the destination's
first stage need not receive rows that it encoded itself, nor the gradients of those whose tokens it
owns.

With both DP dims outermost, index e encodes part e. With PP outermost, the usual order in
production, ranks of later stages encode the samples that first-stage ranks consume but do not
encode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_array


def assign_parts(
    src_dp: int, dest_dp: int, ranks: Sequence[tuple[int, int, bool]]
) -> tuple[int, ...]:
    """Return each source DP index's part, such that the ranks receive the fewest rows in total.

    Among such assignments, one is preferred in which later stages encode what their own DP index
    consumes, as that keeps exchanges among few ranks. If the parts in order are as good, they win.

    Args:
        ranks: for each rank its source DP index, its destination DP index, and whether it is on the
            first stage.
    """
    # Imported here: upstream's scripts, which import this module, need not have SciPy.
    from scipy.sparse import csr_array

    overlap = _overlap(src_dp, dest_dp)
    src, dest, at_first = np.array(ranks, dtype=np.int64).T
    # One row less to receive outweighs any gain of later stages.
    weight = np.where(at_first, 1 + len(ranks) * overlap.max(), 1)
    gain = csr_array((weight, (src, dest)), shape=(src_dp, dest_dp)) @ overlap.T
    in_order = gain.diagonal().sum()
    if in_order == gain.max(axis=1).sum():  # no assignment gains more than each index's best part
        return tuple(range(src_dp))
    from scipy.optimize import linear_sum_assignment  # takes a second, which few layouts need

    gain = gain.toarray()
    _, best = linear_sum_assignment(gain, maximize=True)
    if in_order == gain[np.arange(src_dp), best].sum():
        return tuple(range(src_dp))
    return tuple(best.tolist())


def _overlap(src_dp: int, dest_dp: int) -> csr_array:
    """Return the overlap of each part with each destination index's run, int [src_dp, dest_dp].

    The unit is 1/(src_dp · dest_dp) of the batch.
    """
    from scipy.sparse import csr_array

    bounds = np.union1d(np.arange(src_dp + 1) * dest_dp, np.arange(dest_dp + 1) * src_dp)
    place = bounds[:-1] // dest_dp, bounds[:-1] // src_dp
    return csr_array((np.diff(bounds), place), shape=(src_dp, dest_dp))
