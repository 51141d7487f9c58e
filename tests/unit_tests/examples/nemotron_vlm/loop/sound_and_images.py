# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of images, of sound, of both and of neither; whole microbatches lack one or both."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from examples.mimo.nemotron_vlm.data.sample import DigitTask, SampleSource, Text
from examples.mimo.nemotron_vlm.data.whole_images import WholeImages
from examples.mimo.nemotron_vlm.model.encoders.sound import HOP, SAMPLING_RATE, SHORTEST
from examples.mimo.nemotron_vlm.model.names import (
    BOS,
    EOS,
    FIRST_DIGIT,
    IMAGE,
    IMAGES,
    READ,
)
from examples.mimo.nemotron_vlm.model.presets import tiny_omni

STEP = 32
"""Number of samples in a step."""

TILES, SOUND = tiny_omni().encoders
PICTURES = tiny_omni().with_images_of_any_size().images

LONGEST = 4 * SOUND.subsampling_factor * HOP
"""Samples of a waveform that has one row too many."""


def tone(samples: int, draw: np.random.Generator) -> torch.Tensor:
    """A tone of any height in noise, float32 [samples]."""
    angles = np.arange(samples) * (2 * np.pi * draw.uniform(100, 4000) / SAMPLING_RATE)
    return torch.from_numpy(np.sin(angles) + draw.normal(0, 0.1, samples)).float()


class SoundAndImages(DigitTask):
    """The first half of a step's samples have up to three tiles, the middle half has one or two
    sounds; every third step has no sound at all.
    """

    fingerprint = "sound and images"
    images = TILES

    @property
    def token_ids(self) -> Mapping[str, int]:
        return {IMAGES: IMAGE, SOUND.name: SOUND.token}

    def _sounds(self, number: int) -> np.ndarray:
        has_sound = STEP // 4 <= number % STEP < 3 * STEP // 4 and number // STEP % 3 != 1
        draw = np.random.default_rng([number, 1])
        return draw.integers(SHORTEST, LONGEST, size=(1 + number % 2) * has_sound)

    def _tiles(self, number: int) -> int:
        return 1 + number % 3 if number % STEP < STEP // 2 else 0

    def sizes(self, split: str, first: int, count: int, encoder: str) -> list[np.ndarray]:
        numbers = range(first, first + count)
        if encoder == SOUND.name:
            return [self._sounds(number) for number in numbers]
        return [np.ones(self._tiles(number), dtype=np.int64) for number in numbers]

    def inputs(self, split: str, number: int, encoder: str) -> Sequence[torch.Tensor]:
        draw = np.random.default_rng([number, 2])
        if encoder == SOUND.name:
            return [tone(samples, draw) for samples in self._sounds(number)]
        shape = (self._tiles(number), 3, TILES.tile, TILES.tile)
        return torch.from_numpy(draw.integers(256, size=shape, dtype=np.uint8))

    def text(self, split: str, number: int) -> Text:
        """See `SampleSource`: sounds, then tiles, then digits to read."""
        sounds = int(SOUND.rows(self._sounds(number)).sum())
        images = int(self.images.rows(self.sizes(split, number, 1, IMAGES)[0]).sum())
        prompt = [BOS] + [SOUND.token] * sounds + [IMAGE] * images
        digits = np.random.default_rng([number, 3]).integers(10, size=1 + number % 3)
        ids = torch.tensor([*prompt, READ, *(FIRST_DIGIT + digits), EOS])
        mask = torch.zeros(len(ids) - 1)
        mask[len(prompt) :] = 1
        return Text(ids[:-1], ids[1:], mask)

    def costs(self, split: str, first: int, count: int) -> np.ndarray:
        numbers = range(first, first + count)
        return np.array([(len(self.text(split, n).labels), self._tiles(n)) for n in numbers])


class SoundAndVideo(SoundAndImages):
    """`SoundAndImages` whose tiles are images of any size and clips of video."""

    fingerprint = "sound and video"
    images = PICTURES
    whole = WholeImages(SoundAndImages(), PICTURES, 64, 0)

    def sizes(self, split: str, first: int, count: int, encoder: str) -> list[np.ndarray]:
        source = self.whole if encoder == IMAGES else super()
        return source.sizes(split, first, count, encoder)

    def inputs(self, split: str, number: int, encoder: str) -> Sequence[torch.Tensor]:
        source = self.whole if encoder == IMAGES else super()
        return source.inputs(split, number, encoder)


class PartlyText(SoundAndImages):
    """The first eight samples of a step have one to three tiles, the others and every third step
    have none; no sample has a sound.
    """

    fingerprint = "partly text"
    token_ids = SampleSource.token_ids

    def _sounds(self, number: int) -> np.ndarray:
        return np.zeros(0, dtype=np.int64)

    def _tiles(self, number: int) -> int:
        has_image = number % STEP < STEP // 4 and number // STEP % 3 != 1
        return 1 + number % 3 if has_image else 0
