# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of data sets: text and inputs of each sample; and the digit-reading task."""

import io
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from examples.mimo.nemotron_vlm.model.names import (
    BOS,
    EOS,
    FIRST_DIGIT,
    IMAGE,
    IMAGES,
    PAD,
    READ,
)

Score = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Scores tokens ``read [n]`` against ``labels [n]``: which are right, which count; bool [n]."""


class Text(NamedTuple):
    """Tokens of a sample, without padding unless a `Reader` has added it.

    input_ids: [n] int64, with as many image tokens as the sample's tiles become embeddings.
    labels: [n] int64, the next token at each position.
    loss_mask: [n] float32, 1 where the label is part of an answer.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor


class Question(NamedTuple):
    """A question of a sample, with its media in the order of their placeholders.

    media: 'image', 'sound' or 'video', and the files by name; those of a clip may be its frames.
    asked: as `SampleSource` has it, for this sample. answer: the right answer.
    """

    text: str
    media: list[tuple[str, dict[str, bytes]]]
    asked: Mapping[str, bool] = MappingProxyType({})
    answer: str = ""


class SampleSource:
    """Samples as a function of (split, number), without state; ``split`` is 'train' or 'test'.

    Loading processes use it, so it must survive a fork.

    A data set of images alone has `tiles`; one with inputs of other encoders has `sizes`, `inputs`
    and `token_ids` of its own.

    token_ids: ids of the tokens that encoders' rows replace, by encoder. pad_token: its id.
    vocab_size: above every id in the texts.
    fingerprint: equal for two sources if they have the same samples under the same numbers.
    asked: arguments with which the tokenizer's chat template asks as the training does.
    score: scores answers by token; None counts the samples whose whole answer is right.
    """

    token_ids: Mapping[str, int] = {IMAGES: IMAGE}
    pad_token: int = PAD
    vocab_size: int = FIRST_DIGIT + 10
    fingerprint: str = ""
    asked: Mapping[str, bool] = MappingProxyType({})
    score: Score | None = None

    def text(self, split: str, number: int) -> Text:
        """Return the tokens of sample ``number``, any integer from 0 on."""
        raise NotImplementedError

    def tiles(self, split: str, number: int) -> torch.Tensor:
        """Return the image tiles of sample ``number``, uint8 [n, 3, H, W]; n may be 0."""
        raise NotImplementedError

    def sizes(self, split: str, first: int, count: int, encoder: str) -> list[np.ndarray]:
        """Return the sizes of an encoder's inputs for samples from ``first`` on; must be cheap.

        int64 [inputs] for each sample: what the encoder's entry needs to know how many rows they
        become. All tiles have size 1.
        """
        tiles = self.costs(split, first, count)[:, 1] if encoder == IMAGES else [0] * count
        return [np.ones(number, dtype=np.int64) for number in tiles]

    def inputs(self, split: str, number: int, encoder: str) -> Sequence[torch.Tensor]:
        """Return an encoder's inputs for sample ``number``."""
        return self.tiles(split, number) if encoder == IMAGES else []

    def question(self, split: str, number: int) -> Question | None:
        """Return a sample's only question; None if it has others or cannot be asked."""
        return None

    def shown(self, split: str, number: int) -> Question:
        """Return what a report shows of a sample: by default its question, or its tiles."""
        if asked := self.question(split, number):
            return asked
        tiles = map(png, self.tiles(split, number))
        return Question("", [("image", {str(place): tile for place, tile in enumerate(tiles)})])

    def name(self, split: str, number: int) -> str:
        """Return the name that reports have for a sample."""
        return f"sample {number} of {split}"

    def words(self, tokens: list[int]) -> str:
        """Return an answer's tokens as text."""
        return " ".join(map(str, tokens))

    def part(self, split: str) -> str:
        """Return the name that the data has for a split."""
        return split

    def left_out(self, split: str) -> dict[str, int]:
        """Return how many samples of the data have no number, by reason."""
        return {}

    def costs(self, split: str, first: int, count: int) -> np.ndarray:
        """Return tokens and tiles of samples from ``first`` on, int64 [count, 2]; must be cheap."""
        numbers = range(first, first + count)
        return np.array(
            [(len(self.text(split, n).input_ids), len(self.tiles(split, n))) for n in numbers],
            dtype=np.int64,
        ).reshape(count, 2)


def png(picture: torch.Tensor) -> bytes:
    """Return a picture, uint8 [3, H, W], as a PNG file."""
    from PIL import Image  # only pages and questions need it

    file = io.BytesIO()
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save(file, "PNG")
    return file.getvalue()


def reading_task(image_tokens: int, answer: list[int], seq_length: int) -> Text:
    """Write the sequence BOS, image tokens, READ, answer digits, EOS; the loss is on the last two.

    Args:
        answer: digits 0 … 9.

    Raises:
        ValueError: the sample is longer; nothing is ever cut off.
    """
    prompt = [BOS] + [IMAGE] * image_tokens + [READ]
    ids = torch.tensor(prompt + [FIRST_DIGIT + digit for digit in answer] + [EOS])
    if len(ids) - 1 > seq_length:
        raise ValueError(f"{len(ids) - 1} tokens do not fit a sequence length of {seq_length}")
    mask = torch.zeros(len(ids) - 1)
    mask[len(prompt) - 1 :] = 1
    return Text(ids[:-1], ids[1:], mask)


class DigitTask(SampleSource):
    """Base of the sources whose answers are digits."""

    @staticmethod
    def score(labels: torch.Tensor, read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Score each digit of an answer on its own; other tokens do not count."""
        is_digit = (labels >= FIRST_DIGIT) & (labels < FIRST_DIGIT + 10)
        return (read == labels) & is_digit, is_digit

    def words(self, tokens: list[int]) -> str:
        """See `SampleSource`; the last token should be EOS."""
        digits = (token - FIRST_DIGIT for token in tokens[:-1])
        return "".join(str(digit) if 0 <= digit < 10 else "?" for digit in digits)
