# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Assignment of a step's rows to DP ranks and microbatches, so that all ranks have equal work.

All modules are balanced at once. The rows of a microbatch cost the language model nearly the same,
because its ranks wait for each other in each microbatch; within a microbatch, rows are given to DP
ranks so that all have nearly the same work for encoders in the step. Each encoder rank then encodes
an equal share of the inputs of the DP ranks that it serves, cut between inputs.
"""

from collections.abc import Sequence

import numpy as np


def assign_rows(
    language: Sequence[float], encoders: Sequence[int], microbatches: int, dp: int
) -> np.ndarray:
    """Put each row of a step on a DP rank and into a microbatch.

    Args:
        language: cost of each row for the language model, in any unit.
        encoders: cost of each row for the encoders, in any unit.
        microbatches, dp: the language model's; their product divides the number of rows.

    Returns:
        Row numbers, int64 [microbatches, dp, rows of one rank in a microbatch].
    """
    language, work = np.asarray(language, dtype=np.float64), np.asarray(encoders)
    order = np.lexsort((np.arange(len(work)), -work, -language))
    groups = order.reshape(microbatches, -1)
    placed = np.empty((microbatches, dp, groups.shape[1] // dp), dtype=np.int64)
    load = np.zeros(dp, dtype=np.int64)
    for group, cell in zip(groups, placed, strict=True):
        rows = group[np.argsort(-work[group], kind="stable")]
        for place, row_set in enumerate(rows.reshape(-1, dp)):
            # The rank with the least work so far takes the row with the most.
            ranks = np.argsort(load, kind="stable")
            cell[ranks, place] = row_set
            load[ranks] += work[row_set]
    _exchange(placed, work, load)
    return placed


def in_turns(placed: np.ndarray, encoders: Sequence[int]) -> np.ndarray:
    """Order microbatches by work for encoders: heavy and light in turn, the heaviest and the
    lightest last.

    The host starts the kernels of a light microbatch, and of sounds, more slowly than the GPU ends
    them. It has a lead after heavy ones, and none at a step's beginning. Microbatches that are
    encoded at once also have nearly the same work.
    """
    least = np.argsort(np.asarray(encoders)[placed].sum(axis=(1, 2)), kind="stable")
    half = len(least) // 2
    order = np.empty_like(least)
    order[::2], order[1::2] = least[half:], least[:half][::-1]
    return placed[order]


def _exchange(placed: np.ndarray, work: np.ndarray, load: np.ndarray) -> None:
    """Swap rows of a microbatch between the ranks with the most and the least work."""
    for _ in range(placed.size):
        most, least = int(load.argmax()), int(load.argmin())
        gap = int(load[most] - load[least])
        given, taken = work[placed[:, most]], work[placed[:, least]]
        moved = given[:, :, None] - taken[:, None, :]
        cell, mine, theirs = np.unravel_index(np.abs(gap - 2 * moved).argmin(), moved.shape)
        change = int(moved[cell, mine, theirs])
        if abs(gap - 2 * change) >= gap:
            return
        one, other = (cell, most, mine), (cell, least, theirs)
        placed[one], placed[other] = placed[other], placed[one]
        load[most] -= change
        load[least] += change


def cut_evenly(weights: Sequence[int], parts: int) -> np.ndarray:
    """Return the ``parts + 1`` bounds of consecutive runs whose weights are nearly equal.

    A weight belongs to the run in whose even share its middle lies, so that a large one leaves the
    smaller ones beside it to the other runs.
    """
    weights = np.asarray(weights, dtype=np.int64)
    middles = 2 * np.cumsum(weights) - weights
    inner = [2 * int(weights.sum()) * part // parts for part in range(1, parts)]
    return np.array([0, *np.searchsorted(middles, inner, side="right"), len(weights)])
