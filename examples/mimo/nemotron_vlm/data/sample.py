# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a data set gives: the text and the tiles of a sample, and what it costs to train on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from examples.mimo.nemotron_vlm.text import Text

PAD, BOS, EOS, IMAGE, READ = range(5)
FIRST_DIGIT = 10
"""Token of the digit 0; the others follow. Every preset's vocabulary is larger than these."""

Score = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Of answer tokens ``labels [n]`` and ``read [n]``: which are right, and which count, bool [n]."""


class SampleSource:
    """Samples as a function of (split, number), without state; ``split`` is 'train' or 'test'.

    Loading processes call it, so that it must go through a fork or a pickle.

    image_token, pad_token: ids in its texts, below vocab_size, which bounds all of them.
    tiles_per_sample: on average; the throughput in Megatron's log counts with it.
    fingerprint: says of two sources whether they have the same samples under the same numbers.
    score: of the answers that were read; None counts the samples whose answer is right as a whole.
    """

    image_token: int = IMAGE
    pad_token: int = PAD
    vocab_size: int = FIRST_DIGIT + 10
    tiles_per_sample: float = 1.0
    fingerprint: str = ""
    score: Score | None = None

    def text(self, split: str, number: int) -> Text:
        """Tokens of the sample ``number``, from 0 on, without end."""
        raise NotImplementedError

    def tiles(self, split: str, number: int) -> torch.Tensor:
        """Its image tiles, uint8 [n, 3, H, W]; n may be 0."""
        raise NotImplementedError

    def words(self, tokens: list[int]) -> str:
        """An answer as people read it."""
        return " ".join(map(str, tokens))

    def left_out(self, split: str) -> dict[str, int]:
        """Samples of the data that no number has, counted by reason."""
        return {}

    def costs(self, split: str, first: int, count: int) -> np.ndarray:
        """Tokens and tiles of samples from ``first`` on, int64 [count, 2]; it should be cheap."""
        numbers = range(first, first + count)
        return np.array(
            [(len(self.text(split, n).input_ids), len(self.tiles(split, n))) for n in numbers],
            dtype=np.int64,
        ).reshape(count, 2)


def most_tiles(tokens_per_tile: int, seq_length: int) -> int:
    """Tiles of one `reading_task`, each with a digit of the answer, that a sequence holds."""
    return (seq_length - 2) // (tokens_per_tile + 1)


def reading_length(tiles: int, tokens_per_tile: int) -> int:
    """Tokens of the `reading_task` of so many tiles, each with a digit of the answer."""
    return 2 + tiles * (tokens_per_tile + 1)


def reading_task(tiles: int, answer: list[int], tokens_per_tile: int, seq_length: int) -> Text:
    """Write the sequence BOS, image tokens, READ, answer digits, EOS; the loss is on the last two.

    Args:
        tiles: that the sample has.
        answer: digits 0 … 9.
        seq_length: that it must fit.

    Raises:
        ValueError: if it does not; nothing is ever cut off.
    """
    prompt = [BOS] + [IMAGE] * (tiles * tokens_per_tile) + [READ]
    ids = torch.tensor(prompt + [FIRST_DIGIT + digit for digit in answer] + [EOS])
    if len(ids) - 1 > seq_length:
        raise ValueError(f"{len(ids) - 1} tokens do not fit a sequence length of {seq_length}")
    mask = torch.zeros(len(ids) - 1)
    mask[len(prompt) - 1 :] = 1
    return Text(ids[:-1], ids[1:], mask)


def digit_score(labels: torch.Tensor, read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The digits of an answer count, each for itself."""
    is_digit = (labels >= FIRST_DIGIT) & (labels < FIRST_DIGIT + 10)
    return (read == labels) & is_digit, is_digit


class DigitTask(SampleSource):
    """What reading tasks have in common."""

    score = staticmethod(digit_score)

    def words(self, tokens: list[int]) -> str:
        """See `SampleSource`; the last token should be EOS."""
        digits = (token - FIRST_DIGIT for token in tokens[:-1])
        return "".join(str(digit) if 0 <= digit < 10 else "?" for digit in digits)
