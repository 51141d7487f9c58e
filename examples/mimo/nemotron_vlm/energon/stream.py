# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The samples of a split that can be used, in the order in which training numbers them."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from examples.mimo.nemotron_vlm.energon.conversation import KINDS_OF
from examples.mimo.nemotron_vlm.energon.order import Order
from examples.mimo.nemotron_vlm.energon.store import DataSet
from examples.mimo.nemotron_vlm.energon.survey import GOOD, STATES, Survey

PART = 1 << 20
"""Samples whose states are read at a time."""


class _Numbered(NamedTuple):
    """A data set, its survey, and how many samples are numbered before each that is not.

    skipped: int32 [samples without a number], ascending; it takes less memory than the others'
    indices.
    """

    dataset: DataSet
    survey: Survey
    skipped: np.ndarray

    def indices(self, samples: np.ndarray) -> np.ndarray:
        """Return the indices of numbered samples in the data set, int64 [n]."""
        passed = np.searchsorted(self.skipped, samples.astype(np.int32), side="right")
        return self.dataset.subset.start + samples + passed


class Stream:
    """The numbered samples of a split.

    Args:
        by_weight, seed: see `Order`.
        cut: whether longer ones are cut, as `Survey.states` says.
    """

    def __init__(
        self,
        pairs: list[tuple[DataSet, Survey]],
        by_weight: bool,
        seq_length: int,
        seed: tuple[int, str],
        cut: bool,
    ) -> None:
        self._seq_length, is_cut = seq_length, False
        self.asked: set[int] = set()
        self.left_out: Counter[str] = Counter()
        self.locate = lru_cache(maxsize=4096)(self._locate)
        self._numbered: list[_Numbered] = []
        sizes = []
        for dataset, survey in pairs:
            subset, found, skipped = dataset.subset, np.zeros(len(STATES), np.int64), []
            for first in range(subset.start, subset.stop, PART):
                part = slice(first, min(first + PART, subset.stop))
                states = survey.states(seq_length, cut, part)
                found += np.bincount(states, minlength=len(STATES))
                is_good = states == GOOD
                skipped.append(np.flatnonzero(~is_good) + (first - subset.start))
                asked = np.bincount(survey.asked[part][is_good])
                self.asked.update(np.flatnonzero(asked).tolist())
                is_cut |= bool((survey.tokens[part][is_good] > seq_length).any())
            sizes.append(int(found[GOOD]))
            found[GOOD] = 0
            self.left_out.update({STATES[i]: int(found[i]) for i in np.flatnonzero(found)})
            if not sizes[-1]:
                counts = ", ".join(f"{n} {reason}" for reason, n in self.left_out.items())
                raise ValueError(
                    f"{dataset.path}: none of {len(subset)} samples of {seed[1]} can be used: "
                    f"{counts}; a sequence has {seq_length} tokens"
                )
            skipped = np.concatenate(skipped)
            before = (skipped - np.arange(len(skipped))).astype(np.int32)
            self._numbered.append(_Numbered(dataset, survey, before))
        self.order = Order(sizes, by_weight, [dataset.weight for dataset, _ in pairs], seed)
        blend = [
            [survey.fingerprint, dataset.weight, dataset.subset.start, dataset.subset.stop, size]
            for (dataset, survey), size in zip(pairs, sizes, strict=True)
        ]
        depends = [by_weight, blend, seed, *([seq_length] if is_cut else [])]
        self.fingerprint = hashlib.sha256(json.dumps(depends).encode()).hexdigest()

    def _locate(self, number: int) -> tuple[DataSet, int, Survey]:
        """Return a sample's data set, its index there, and the data set's survey."""
        (place,), sample = self.order.locate(np.array([number], np.int64))
        numbered = self._numbered[place]
        return numbered.dataset, int(numbered.indices(sample)[0]), numbered.survey

    def costs(self, first: int, count: int) -> np.ndarray:
        """Return tokens and inputs of samples from a number on, int64 [count, 2]."""
        costs = np.empty((count, 2), np.int64)
        for here, survey, indices in self._drawn(first, count):
            costs[here, 0] = np.minimum(survey.tokens[indices], self._seq_length)
            costs[here, 1] = survey.inputs[indices]
        return costs

    def sizes(self, first: int, count: int, encoder: str) -> list[np.ndarray]:
        """Return the sizes of an encoder's inputs of each sample from a number on, int64."""
        sizes: list[np.ndarray] = [None] * count
        for here, survey, indices in self._drawn(first, count):
            found, counts = survey.media_in(indices, KINDS_OF[encoder])
            for place, number, end in zip(here, counts, np.cumsum(counts), strict=True):
                sizes[place] = found[end - number : end]
        return sizes

    def _drawn(self, first: int, count: int) -> Iterator[tuple[np.ndarray, Survey, np.ndarray]]:
        """Yield, for each data set, the places of its samples among those from a number on, its
        survey, and the samples' indices there."""
        places, drawn = self.order.locate(np.arange(first, first + count, dtype=np.int64))
        for place, numbered in enumerate(self._numbered):
            here = np.flatnonzero(places == place)
            yield here, numbered.survey, numbered.indices(drawn[here])
