# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which part of the batch each DP index of an encoder encodes; plain data, any world size.

The destination's DP index d consumes the d-th of ``dest_dp`` equal runs of the batch, and the
source cuts the batch into ``src_dp`` equal runs, its *parts*. Which source DP index encodes which
part is free, so it is chosen such that ranks encode what they consume: every row that a rank of the
destination's first stage has itself is one that it need not receive, and a rank that owns some of
the rows that it encoded need not receive their gradient.

With both DP dims outermost the e-th index encodes the e-th part. With PP outermost, as production
orders ranks, the ranks of later stages encode what the first stage's ranks have no time for.
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
    """Part that each source DP index encodes, so that all ranks together receive the least rows.

    Among such assignments it takes one where later stages encode what their own DP index consumes,
    which keeps exchanges among few ranks; and the parts in order, where that is as good.

    Args:
        src_dp, dest_dp: DP sizes.
        ranks: source DP index, destination DP index, and whether on the first stage, of each rank.
    """
    # Imported here: upstream's scripts, which import this module, need not have SciPy.
    from scipy.optimize import linear_sum_assignment
    from scipy.sparse import csr_array

    overlap = _overlap(src_dp, dest_dp)
    src, dest, at_first = np.array(ranks, dtype=np.int64).T
    # One row less to receive outweighs whatever later stages gain.
    weight = np.where(at_first, 1 + len(ranks) * overlap.max(), 1)
    gain = csr_array((weight, (src, dest)), shape=(src_dp, dest_dp)) @ overlap.T
    in_order = gain.diagonal().sum()
    if in_order == gain.max(axis=1).sum():  # no assignment gains more than each index's best part
        return tuple(range(src_dp))
    gain = gain.toarray()
    _, best = linear_sum_assignment(gain, maximize=True)
    if in_order == gain[np.arange(src_dp), best].sum():
        return tuple(range(src_dp))
    return tuple(best.tolist())


def _overlap(src_dp: int, dest_dp: int) -> csr_array:
    """What part p and the run of destination index d have in common, [src_dp, dest_dp].

    In units of 1/(src_dp · dest_dp) of the batch.
    """
    from scipy.sparse import csr_array

    bounds = np.union1d(np.arange(src_dp + 1) * dest_dp, np.arange(dest_dp + 1) * src_dp)
    place = bounds[:-1] // dest_dp, bounds[:-1] // src_dp
    return csr_array((np.diff(bounds), place), shape=(src_dp, dest_dp))
