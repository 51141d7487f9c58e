# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Scikit-learn's handwritten digits (real 8×8 scans of the UCI test set) as a reading task.

A sample is a strip of digits, one image tile each, with the digits as the answer to read. For tests
of speed and shapes at any model size, `MockStrips` have random pixels and answers.
"""

import functools
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from examples.mimo.nemotron_vlm.data.sample import DigitTask, Question, Text, png, reading_task

TEST_EVERY = 5
"""Every fifth scan is held out for the test split."""

MOST_DIGITS = 3
"""Digits of a sample at most; fewer if the sequence length does not hold as many."""


@functools.cache
def load_scans() -> tuple[np.ndarray, np.ndarray]:
    """Read scikit-learn's file of scans, once; importing its package would take seconds.

    Returns:
        Pixels from 0 to 16, float64 [scans, 8, 8], and the digits that they show, int64 [scans].
    """
    package = Path(find_spec("sklearn").origin).parent
    table = np.loadtxt(package / "datasets/data/digits.csv.gz", delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


class Strips(DigitTask):
    """Samples with a digit of the answer for each tile; subclasses draw both.

    Attribute ``most``: tiles, with their digits, that fit the sequence length, or 1.
    """

    def __init__(self, tokens_per_tile: int, seq_length: int, seed: int) -> None:
        self._tokens_per_tile = tokens_per_tile
        self._seq_length = seq_length
        self._seed = seed
        self.most = max(1, (seq_length - 2) // (tokens_per_tile + 1))

    def answer(self, split: str, number: int) -> list[int]:
        """Return the digits of a sample."""
        raise NotImplementedError

    def text(self, split: str, number: int) -> Text:
        answer = self.answer(split, number)
        return reading_task(len(answer) * self._tokens_per_tile, answer, self._seq_length)

    def costs(self, split: str, first: int, count: int) -> np.ndarray:
        tiles = [len(self.answer(split, number)) for number in range(first, first + count)]
        tiles = np.array(tiles, dtype=np.int64)
        return np.stack([2 + tiles * (self._tokens_per_tile + 1), tiles], axis=1)


class DigitStrips(Strips):
    """Strips of one to `MOST_DIGITS` tiles drawn from scikit-learn's digits.

    Args:
        tile: tile height and width in pixels.
        tokens_per_tile: embeddings that the encoder makes of one tile.
        seed: seed of the samples drawn; the train/test split does not depend on it.
        digits: number of digits of every strip; None for one to `MOST_DIGITS`.
    """

    def __init__(
        self,
        tile: int,
        tokens_per_tile: int,
        seq_length: int,
        seed: int,
        digits: int | None = None,
    ) -> None:
        super().__init__(tokens_per_tile, seq_length, seed)
        scans, digits_of = load_scans()
        images = torch.from_numpy(scans).float() * (255 / 16)
        images = F.interpolate(images[:, None], size=(tile, tile), mode="bilinear").byte()
        held_out = torch.arange(len(images)) % TEST_EVERY == 0
        self._splits = {
            "train": (images[~held_out], digits_of[~held_out.numpy()]),
            "test": (images[held_out], digits_of[held_out.numpy()]),
        }
        most = min(MOST_DIGITS, self.most)
        self._fewest, self._most = (1, most) if digits is None else (digits, digits)
        self.fingerprint = f"digits of {tile} pixels, seed {seed}"
        if digits is not None:
            self.fingerprint += f", {digits} a strip"
        elif most < MOST_DIGITS:
            self.fingerprint += f", at most {most} a strip"

    def answer(self, split: str, number: int) -> list[int]:
        return self._splits[split][1][self._chosen(split, number)].tolist()

    def tiles(self, split: str, number: int) -> torch.Tensor:
        tiles = self._splits[split][0][self._chosen(split, number)]
        if split == "train":  # moved by up to a pixel: there are few scans, soon known by heart
            draw, size = np.random.default_rng([self._seed, 2, number]), tiles.shape[-1]
            places = draw.integers(3, size=(len(tiles), 2)).tolist()
            wide = zip(F.pad(tiles, (1, 1, 1, 1)), places, strict=True)
            tiles = torch.stack([each[:, y : y + size, x : x + size] for each, (y, x) in wide])
        return tiles.expand(-1, 3, -1, -1)

    def question(self, split: str, number: int) -> Question:
        strip = png(torch.cat([*self.tiles(split, number)], -1))
        answer = " ".join(map(str, self.answer(split, number)))
        return Question("read", [("image", {"strip.png": strip})], answer=answer)

    def _chosen(self, split: str, number: int) -> np.ndarray:
        draw = np.random.default_rng([self._seed, split == "test", number])
        scans = len(self._splits[split][1])
        return draw.integers(scans, size=draw.integers(self._fewest, self._most + 1))


class MockStrips(Strips):
    """Samples with as many tiles as the sequence length holds; nothing can be learnt from them."""

    def __init__(self, tile: int, tokens_per_tile: int, seq_length: int, seed: int) -> None:
        super().__init__(tokens_per_tile, seq_length, seed)
        self._shape = (self.most, 3, tile, tile)
        self.fingerprint = f"mock of {self._shape}, seed {seed}"

    def answer(self, split: str, number: int) -> list[int]:
        draw = np.random.default_rng([self._seed, split == "test", number, 1])
        return draw.integers(10, size=self.most).tolist()

    def tiles(self, split: str, number: int) -> torch.Tensor:
        draw = np.random.default_rng([self._seed, split == "test", number])
        return torch.from_numpy(draw.integers(256, size=self._shape, dtype=np.uint8))
