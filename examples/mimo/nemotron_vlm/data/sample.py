# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a data set gives: one sample, and the tokens it is written in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

PAD, BOS, EOS, IMAGE, READ = range(5)
FIRST_DIGIT = 10
"""Token of the digit 0; the others follow. Every preset's vocabulary is larger than these."""


@dataclass(frozen=True)
class Sample:
    """One training example.

    tiles: [n, 3, H, W] float32, pixels in [0, 1].
    input_ids: [S] int64, with as many IMAGE tokens as the tiles become embeddings.
    labels: [S] int64, the next token at each position.
    loss_mask: [S] float32, 1 where the label is part of the answer.
    """

    tiles: torch.Tensor
    input_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor


class SampleSource(Protocol):
    """Samples as a function of (split, number); no state, no order.

    A class in ``SOURCES`` is made with ``tile`` (pixels), ``tokens_per_tile``, ``seq_length``
    (tokens) and ``seed``, and raises ValueError where its samples do not fit them.

    tiles_per_sample: on average; the throughput in Megatron's log counts with it.
    """

    tiles_per_sample: float

    def sample(self, split: str, number: int) -> Sample:
        """The sample ``number``, from 0 on; ``split`` is 'train' or 'test'."""
        ...


def most_tiles(tokens_per_tile: int, seq_length: int) -> int:
    """Tiles of one `reading_task`, each with a digit of the answer, that a sequence holds."""
    return (seq_length - 2) // (tokens_per_tile + 1)


def reading_task(
    tiles: torch.Tensor, answer: list[int], tokens_per_tile: int, seq_length: int
) -> Sample:
    """Write the sequence BOS, image tokens, READ, answer digits, EOS; the loss is on the last two.

    Args:
        tiles: [n, 3, H, W].
        answer: digits 0 … 9.

    Raises:
        ValueError: if it does not fit ``seq_length``; nothing is ever cut off.
    """
    prompt = [BOS] + [IMAGE] * (len(tiles) * tokens_per_tile) + [READ]
    text = prompt + [FIRST_DIGIT + digit for digit in answer] + [EOS]
    if len(text) - 1 > seq_length:
        raise ValueError(f"{len(text) - 1} tokens do not fit a sequence length of {seq_length}")
    ids = torch.full((seq_length + 1,), PAD, dtype=torch.int64)
    ids[: len(text)] = torch.tensor(text)
    mask = torch.zeros(seq_length)
    mask[len(prompt) - 1 : len(text) - 1] = 1
    return Sample(tiles, ids[:-1], ids[1:], mask)
