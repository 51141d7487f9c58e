# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Assignment of a step's rows to DP ranks and microbatches, so that all ranks have equal work.

Both modules are balanced at once. The rows of a microbatch cost the language model nearly the same,
because its ranks wait for each other in each microbatch; within a microbatch, rows are given to DP
ranks so that all have nearly the same number of tiles in the step. Each encoder rank then encodes
an equal share of the tiles of the DP ranks that it serves, cut between tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def assign_rows(
    language: Sequence[float], tiles: Sequence[int], microbatches: int, dp: int
) -> np.ndarray:
    """Put each row of a step on a DP rank and into a microbatch.

    Args:
        language: cost of each row for the language model, in any unit.
        tiles: number of tiles of each row.
        microbatches, dp: the language model's; their product divides the number of rows.

    Returns:
        Row numbers, int64 [microbatches, dp, rows of one rank in a microbatch].
    """
    language, tiles = np.asarray(language, dtype=np.float64), np.asarray(tiles)
    order = np.lexsort((np.arange(len(tiles)), -tiles, -language))
    groups = order.reshape(microbatches, -1)
    placed = np.empty((microbatches, dp, groups.shape[1] // dp), dtype=np.int64)
    load = np.zeros(dp, dtype=np.int64)
    for group, cell in zip(groups, placed, strict=True):
        rows = group[np.argsort(-tiles[group], kind="stable")]
        for place, row_set in enumerate(rows.reshape(-1, dp)):
            # The rank with the fewest tiles so far takes the row with the most.
            ranks = np.argsort(load, kind="stable")
            cell[ranks, place] = row_set
            load[ranks] += tiles[row_set]
    _exchange(placed, tiles, load)
    return placed


def _exchange(placed: np.ndarray, tiles: np.ndarray, load: np.ndarray) -> None:
    """Swap rows of a microbatch between the ranks with the most and the fewest tiles."""
    for _ in range(placed.size):
        most, least = int(load.argmax()), int(load.argmin())
        gap = int(load[most] - load[least])
        given, taken = tiles[placed[:, most]], tiles[placed[:, least]]
        moved = given[:, :, None] - taken[:, None, :]
        cell, mine, theirs = np.unravel_index(np.abs(gap - 2 * moved).argmin(), moved.shape)
        change = int(moved[cell, mine, theirs])
        if abs(gap - 2 * change) >= gap:
            return
        one, other = (cell, most, mine), (cell, least, theirs)
        placed[one], placed[other] = placed[other], placed[one]
        load[most] -= change
        load[least] += change


def cut_evenly(total: int, parts: int) -> list[int]:
    """Return the ``parts + 1`` bounds of ``parts`` consecutive runs of nearly equal size."""
    return [total * part // parts for part in range(parts + 1)]
