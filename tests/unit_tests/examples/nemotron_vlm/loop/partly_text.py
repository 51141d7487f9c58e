# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples, most without an image: whole microbatches and a whole step are text alone."""

from __future__ import annotations

import numpy as np
import torch

from examples.mimo.nemotron_vlm.data.sample import DigitTask, Text, reading_task

STEP = 32
"""Number of samples in a step."""

SEQ_LENGTH, TILE, TOKENS_PER_TILE, MOST_TILES = 32, 16, 4, 3
"""Sizes of the preset ``tiny``."""


class PartlyText(DigitTask):
    """The first eight samples of a step have one to three tiles, the others and every third step
    have none.
    """

    tiles_per_sample = 0.25
    fingerprint = "partly text"

    def _tiles(self, number: int) -> int:
        has_image = number % STEP < 8 and number // STEP % 3 != 1
        return 1 + number % MOST_TILES if has_image else 0

    def text(self, split: str, number: int) -> Text:
        """See `SampleSource`."""
        answer = np.random.default_rng([number, 1]).integers(10, size=1 + number % MOST_TILES)
        return reading_task(self._tiles(number), answer.tolist(), TOKENS_PER_TILE, SEQ_LENGTH)

    def tiles(self, split: str, number: int) -> torch.Tensor:
        """See `SampleSource`."""
        shape = (self._tiles(number), 3, TILE, TILE)
        pixels = np.random.default_rng([number, 2]).integers(256, size=shape, dtype=np.uint8)
        return torch.from_numpy(pixels)
