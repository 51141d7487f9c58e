# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The numbering of samples: epochs and blends as pure functions of (sizes, weights, seed).

No state is kept, so any rank, worker or resumed run finds the same sample under the same number.
"""

import hashlib

import numpy as np

PERIOD = 1 << 16
"""Samples after which a blend repeats; its shares are rounded to multiples of the reciprocal."""

ROUNDS = 6


class Order:
    """The order of the samples of several data sets.

    Args:
        sizes: samples of each data set, at least 1.
        by_weight: whether each data set has its share of the samples, in epochs of its own; else an
            epoch has the samples of each data set ``weights`` times, all shuffled.
        weights: see ``by_weight``; None counts as 1.
        seed: any object with a stable ``repr``; different seeds give different orders.

    Raises:
        ValueError: a weight is not positive, or a data set's repetitions give no sample.
    """

    def __init__(
        self,
        sizes: list[int],
        by_weight: bool,
        weights: list[float | None],
        seed: object,
    ) -> None:
        self._sizes = np.array(sizes, np.int64)
        digest = hashlib.sha256(repr(seed).encode()).digest()
        self._key = np.frombuffer(digest[:8], "<u8")
        if by_weight:
            self.shares, self._dataset, self._rank = blend(weights)
            self.epoch_size = None
            return
        times = [1 if weight is None else weight for weight in weights]
        counts = [int(number * size) for number, size in zip(times, sizes, strict=True)]
        if min(counts) < 1:
            raise ValueError(f"repetitions {times} of {sizes} samples: less than one")
        self.shares = np.array(counts, np.int64)
        self.epoch_size = sum(counts)

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the data set of each number, and the sample in that data set.

        Args:
            numbers: int64 [n], from 0 on.

        Returns:
            Two arrays, int64 [n]: data sets, and samples in them.
        """
        if self.epoch_size is None:
            period, place = np.divmod(numbers, len(self._dataset))
            dataset = self._dataset[place]
            drawn = period * self.shares[dataset] + self._rank[place]
            again, place = np.divmod(drawn, self._sizes[dataset])
            return dataset, shuffled(place, self._sizes[dataset], self._keys(again, dataset))
        epoch, place = np.divmod(numbers, self.epoch_size)
        size = np.full_like(place, self.epoch_size)
        slot = shuffled(place, size, self._keys(epoch, np.zeros_like(epoch)))
        ends = np.cumsum(self.shares)
        dataset = np.searchsorted(ends, slot, side="right")
        drawn = epoch * self.shares[dataset] + slot - (ends - self.shares)[dataset]
        return dataset, drawn % self._sizes[dataset]

    def _keys(self, epoch: np.ndarray, dataset: np.ndarray) -> np.ndarray:
        return _mixed(epoch.astype(np.uint64) ^ _mixed(dataset.astype(np.uint64) + self._key))


def blend(weights: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a period of a blend: its first n samples hold each data set's share of n, within one.

    The j-th sample of a data set with share w must be at one of the places floor(j/w) …
    ceil((j+1)/w) - 1. Each place goes to the sample with the earliest deadline among those allowed
    there. Because the shares sum to 1, this meets all deadlines (Baruah et al. 1996, "Proportionate
    progress").

    Args:
        weights: one for each data set, all positive.

    Returns:
        shares: int64 [k], places of each data set in the period of p places.
        dataset, rank: int64 [p], the data set of each place, and how many of its places come
            before.

    Raises:
        ValueError: a weight is not positive.
    """
    shares = _shares(np.array(weights, float))
    period = int(shares.sum())
    drawn = np.zeros_like(shares)
    dataset, rank = np.empty((2, period), np.int64)
    for place in range(period):
        deadlines = -(-(drawn + 1) * period // shares)
        too_early = drawn * period // shares > place
        number = np.where(too_early, period + 1, deadlines).argmin()
        dataset[place], rank[place] = number, drawn[number]
        drawn[number] += 1
    return shares, dataset, rank


def shuffled(places: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the image of each place under a pseudo-random permutation, computed without a table.

    A Feistel network permutes the next power of four, and is applied until the image is below the
    size (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite domains").

    Args:
        places: int64 [n], each below its size.
        sizes: int64 [n], elements that each permutation has.
        keys: uint64 [n]; each key gives another permutation.

    Returns:
        int64 [n].
    """
    bits = np.ceil(np.log2(np.maximum(sizes, 2))).astype(np.uint64)
    half = (bits + np.uint64(1)) // np.uint64(2)
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = places.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        left, right = values[outside] >> half[outside], values[outside] & mask[outside]
        for number in range(ROUNDS):
            mixed = _mixed(right ^ _mixed(keys[outside] + np.uint64(number)))
            left, right = right, left ^ mixed & mask[outside]
        values[outside] = left << half[outside] | right
        outside = outside[values[outside] >= sizes[outside].astype(np.uint64)]
    return values.astype(np.int64)


def _shares(weights: np.ndarray) -> np.ndarray:
    """Return each data set's places in a period: exact if one up to 10,000 allows, else rounded."""
    if not (weights > 0).all():
        raise ValueError(f"weights {weights.tolist()} must be positive")
    weights = weights / weights.sum()
    periods = np.arange(1, 10_001)
    exact = np.abs(periods[:, None] * weights - np.rint(periods[:, None] * weights)).max(1) < 1e-6
    exact &= (np.rint(periods[:, None] * weights) > 0).all(1)
    if exact.any():
        return np.rint(periods[exact.argmax()] * weights).astype(np.int64)
    shares = np.maximum(1, np.floor(weights * PERIOD)).astype(np.int64)
    missing = PERIOD - shares.sum()
    shares[np.argsort(shares - weights * PERIOD, kind="stable")[: max(0, missing)]] += 1
    return shares


def _mixed(values: np.ndarray) -> np.ndarray:
    """Hash each element with SplitMix64 (Steele, Lea and Flood 2014); uint64 [n]."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
