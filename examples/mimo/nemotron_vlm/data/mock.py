# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Random pixels and random answers, for speed and shape tests at any model size."""

from __future__ import annotations

import numpy as np
import torch

from examples.mimo.nemotron_vlm.data.sample import Sample, most_tiles, reading_task


class MockStrips:
    """Samples with as many tiles as the sequence length holds; nothing can be learnt from them."""

    def __init__(self, tile: int, tokens_per_tile: int, seq_length: int, seed: int) -> None:
        self._shape = (max(1, most_tiles(tokens_per_tile, seq_length)), 3, tile, tile)
        self.tiles_per_sample = float(self._shape[0])
        self._tokens_per_tile = tokens_per_tile
        self._seq_length = seq_length
        self._seed = seed

    def sample(self, split: str, number: int) -> Sample:
        """See `SampleSource`."""
        draw = np.random.default_rng([self._seed, split == "test", number])
        tiles = torch.from_numpy(draw.random(self._shape, dtype=np.float32))
        answer = draw.integers(10, size=self._shape[0]).tolist()
        return reading_task(tiles, answer, self._tokens_per_tile, self._seq_length)
