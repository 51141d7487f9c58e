# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The samples of a split that can be used, in the order in which training numbers them."""

import hashlib
import json
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from examples.mimo.nemotron_vlm.energon.order import Order
from examples.mimo.nemotron_vlm.energon.store import DataSet
from examples.mimo.nemotron_vlm.energon.survey import GOOD, STATES, Survey


class Numbered(NamedTuple):
    """A data set, its survey, and the indices of the samples that have a number, int32."""

    dataset: DataSet
    survey: Survey
    indices: np.ndarray


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
        self.datasets: list[Numbered] = []
        for dataset, survey in pairs:
            subset = dataset.subset
            states = survey.states(seq_length, cut)[subset.start : subset.stop]
            indices = (np.flatnonzero(states == GOOD) + subset.start).astype(np.int32)
            found = np.bincount(states, minlength=len(STATES))
            found[GOOD] = 0
            self.left_out.update({STATES[i]: int(found[i]) for i in np.flatnonzero(found)})
            if not len(indices):
                counts = ", ".join(f"{n} {reason}" for reason, n in self.left_out.items())
                raise ValueError(
                    f"{dataset.path}: none of {len(subset)} samples of {seed[1]} can be used: "
                    f"{counts}; a sequence has {seq_length} tokens"
                )
            self.asked.update(np.unique(survey.asked[indices]).tolist())
            is_cut |= bool((survey.tokens[indices] > seq_length).any())
            self.datasets.append(Numbered(dataset, survey, indices))
        sizes = [len(each.indices) for each in self.datasets]
        self.order = Order(sizes, by_weight, [dataset.weight for dataset, _ in pairs], seed)
        blend = [
            [survey.fingerprint, dataset.weight, dataset.subset.start, dataset.subset.stop, size]
            for (dataset, survey), size in zip(pairs, sizes, strict=True)
        ]
        depends = [by_weight, blend, seed, *([seq_length] if is_cut else [])]
        self.fingerprint = hashlib.sha256(json.dumps(depends).encode()).hexdigest()

    def _locate(self, number: int) -> tuple[DataSet, int, Survey]:
        """Return a sample's data set, its index there, and the data set's survey."""
        (place,), (sample,) = self.order.locate(np.array([number], np.int64))
        dataset, survey, indices = self.datasets[place]
        return dataset, int(indices[sample]), survey

    def costs(self, numbers: np.ndarray) -> np.ndarray:
        """Return tokens and inputs of samples by number, int64 [n, 2]."""
        costs = np.empty((len(numbers), 2), np.int64)
        places, samples = self.order.locate(numbers)
        for place, (_, survey, indices) in enumerate(self.datasets):
            here = places == place
            drawn = indices[samples[here]]
            costs[here, 0] = np.minimum(survey.tokens[drawn], self._seq_length)
            costs[here, 1] = survey.inputs[drawn]
        return costs

    def sizes(self, numbers: np.ndarray, encoder: str) -> list[np.ndarray]:
        """Return the sizes of an encoder's inputs of each sample by number, int64."""
        sizes = []
        for place, sample in zip(*self.order.locate(numbers), strict=True):
            _, survey, indices = self.datasets[place]
            extents = survey.extents(indices[sample], encoder)
            sizes.append(np.array([extent.size for extent in extents], np.int64))
        return sizes
