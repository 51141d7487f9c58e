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
from examples.mimo.nemotron_vlm.energon.store import DataSet, Mode
from examples.mimo.nemotron_vlm.energon.survey import GOOD, STATES, Survey


class _Numbered(NamedTuple):
    """A data set, its survey, and the indices of the samples that are numbered, int64 [n]."""

    dataset: DataSet
    survey: Survey
    samples: np.ndarray


class Stream:
    """The numbered samples of a split.

    Args:
        mode, seed: see `Order`.
        cut: whether longer ones are cut, as `Survey.states` says.
    """

    def __init__(
        self,
        pairs: list[tuple[DataSet, Survey]],
        mode: Mode,
        seq_length: int,
        seed: tuple[int, str],
        cut: bool,
    ) -> None:
        self._seq_length, is_cut = seq_length, False
        self.asked: set[int] = set()
        self.left_out: Counter[str] = Counter()
        self.locate = lru_cache(maxsize=4096)(self._locate)
        self._numbered: list[_Numbered] = []
        for dataset, survey in pairs:
            chosen = np.arange(dataset.subset.start, dataset.subset.stop)
            states = survey.states(seq_length, cut)[chosen]
            self.left_out.update(
                STATES[state] for state in np.sort(states[states != GOOD]).tolist()
            )
            if not (states == GOOD).any():
                counts = ", ".join(f"{n} {reason}" for reason, n in self.left_out.items())
                raise ValueError(
                    f"{dataset.path}: none of {len(chosen)} samples of {seed[1]} can be used: "
                    f"{counts}; a sequence has {seq_length} tokens"
                )
            self._numbered.append(_Numbered(dataset, survey, chosen[states == GOOD]))
            self.asked.update(survey.asked[chosen[states == GOOD]].tolist())
            is_cut |= bool((survey.tokens[chosen[states == GOOD]] > seq_length).any())
        sizes = [len(each.samples) for each in self._numbered]
        self.order = Order(sizes, mode, [dataset.weight for dataset, _ in pairs], seed)
        blend = [
            [survey.fingerprint, dataset.weight, dataset.subset.start, dataset.subset.stop, size]
            for (dataset, survey), size in zip(pairs, sizes, strict=True)
        ]
        depends = [mode, blend, seed, *([seq_length] if is_cut else [])]
        self.fingerprint = hashlib.sha256(json.dumps(depends).encode()).hexdigest()

    def _locate(self, number: int) -> tuple[DataSet, int, Survey]:
        """Return a sample's data set, its index there, and the data set's survey."""
        (place,), (sample,) = self.order.locate(np.array([number], np.int64))
        dataset, survey, samples = self._numbered[place]
        return dataset, int(samples[sample]), survey

    def costs(self, numbers: np.ndarray) -> np.ndarray:
        """Return tokens and inputs of samples by number, int64 [n, 2]."""
        costs = np.empty((len(numbers), 2), np.int64)
        places, drawn = self.order.locate(numbers)
        for place, (_, survey, samples) in enumerate(self._numbered):
            here = places == place
            indices = samples[drawn[here]]
            costs[here, 0] = np.minimum(survey.tokens[indices], self._seq_length)
            costs[here, 1] = survey.inputs[indices]
        return costs

    def sizes(self, numbers: np.ndarray, encoder: str) -> list[np.ndarray]:
        """Return the sizes of an encoder's inputs of each sample by number, int64."""
        if len(numbers) == 1:  # of a sample that is being read
            places = [self.locate(int(numbers[0]))[1:]]
        else:
            numbered = zip(*self.order.locate(numbers), strict=True)
            pairs = ((self._numbered[place], drawn) for place, drawn in numbered)
            places = [(samples[drawn], survey) for (_, survey, samples), drawn in pairs]
        found = (survey.extents(index, encoder) for index, survey in places)
        return [np.array([extent.size for extent in each], np.int64) for each in found]
