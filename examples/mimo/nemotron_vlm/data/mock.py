# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Random pixels and answers, for tests of speed and shapes at any model size."""

import numpy as np
import torch

from examples.mimo.nemotron_vlm.data.sample import (
    DigitTask,
    Text,
    most_tiles,
    reading_length,
    reading_task,
)


class MockStrips(DigitTask):
    """Samples with as many tiles as the sequence length holds; nothing can be learnt from them."""

    def __init__(self, tile: int, tokens_per_tile: int, seq_length: int, seed: int) -> None:
        self._shape = (max(1, most_tiles(tokens_per_tile, seq_length)), 3, tile, tile)
        self._tokens_per_tile = tokens_per_tile
        self._seq_length = seq_length
        self._seed = seed
        self.fingerprint = f"mock of {self._shape}, seed {seed}"

    def text(self, split: str, number: int) -> Text:
        draw = np.random.default_rng([self._seed, split == "test", number, 1])
        answer = draw.integers(10, size=self._shape[0]).tolist()
        return reading_task(len(answer), answer, self._tokens_per_tile, self._seq_length)

    def tiles(self, split: str, number: int) -> torch.Tensor:
        draw = np.random.default_rng([self._seed, split == "test", number])
        return torch.from_numpy(draw.integers(256, size=self._shape, dtype=np.uint8))

    def costs(self, split: str, first: int, count: int) -> np.ndarray:
        cost = reading_length(self._shape[0], self._tokens_per_tile), self._shape[0]
        return np.tile(np.array(cost, dtype=np.int64), (count, 1))
