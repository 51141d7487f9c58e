# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of energon's data sets, each a function of (data, seed, split, number)."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from examples.mimo.nemotron_vlm.data.sample import SampleSource
from examples.mimo.nemotron_vlm.data.text import Text
from examples.mimo.nemotron_vlm.energon.conversation import IMAGE, Chat
from examples.mimo.nemotron_vlm.energon.encoding import Encoder
from examples.mimo.nemotron_vlm.energon.errors import Excluded
from examples.mimo.nemotron_vlm.energon.order import Order
from examples.mimo.nemotron_vlm.energon.records import DEFAULT_PROMPT
from examples.mimo.nemotron_vlm.energon.store import DataSet, Mode, open_split
from examples.mimo.nemotron_vlm.energon.survey import (
    GOOD,
    STATES,
    Survey,
    bad_samples,
    load_survey,
)
from examples.mimo.nemotron_vlm.energon.tiling import Tiling

NAMED = 3
"""Number of bad samples that a refusal names."""


class EnergonSource(SampleSource):
    """Samples of a data set or a blend that has been prepared and surveyed.

    ``split`` is 'train' or 'test', which is energon's ``val`` (or ``test`` if that is empty).
    Samples can be read in forked and in spawned processes.

    Args:
        path: a directory that ``energon prepare`` has prepared, or a ``metadataset.yaml``.
        tile: height and width of a tile in pixels.
        tokens_per_tile: embeddings of a tile.
        seq_length: tokens that a sample may have; longer ones are left out, nothing is cut off.
        seed: seed of the order.
        tokenizer: directory of a Hugging Face tokenizer.
        max_tiles, thumbnail: see `Tiling`.
        bad_samples: 'skip' leaves bad samples out of the numbering, 'refuse' raises.
        prompt: question for samples that have only a caption.
        image_token: the tokenizer's token for an image.
        surveys: directory of the surveys; by default that of energon's metadata.

    Raises:
        ValueError: the data, its survey or the tokenizer is missing or unfit; or there are bad
            samples and ``bad_samples`` is 'refuse'. The message is one line.

    Attributes:
        tiles_per_sample: mean over the training split.
        fingerprint: hash of the training split's samples, their tokens and tiles, and their order;
            the same wherever the data lies, and for every sequence length that leaves out the same
            samples.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        tile: int,
        tokens_per_tile: int,
        seq_length: int,
        seed: int,
        tokenizer: str | Path,
        max_tiles: int = 12,
        thumbnail: bool = True,
        bad_samples: Literal["skip", "refuse"] = "skip",
        prompt: str = DEFAULT_PROMPT,
        image_token: str = IMAGE,
        surveys: str | Path | None = None,
    ) -> None:
        self._arguments = {
            name: value for name, value in locals().items() if name not in ("self", "__class__")
        }
        chat = Chat(tokenizer, image_token)
        self._encoder = Encoder(chat, Tiling(tile, max_tiles, thumbnail), tokens_per_tile, prompt)
        self._streams: dict[str, _Stream] = {}
        self.image_token, self.pad_token = chat.image_token, chat.pad_token
        self.vocab_size = chat.vocab_size
        train = self._stream("train")
        self.tiles_per_sample = train.mean_tiles
        self.fingerprint = train.fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(EnergonSource, **self._arguments), ()

    def epoch_size(self, split: str) -> int | None:
        """Return the samples of an epoch; None for a blend by weight, which has no epochs."""
        return self._stream(split).order.epoch_size

    def costs(self, split: str, first: int, count: int) -> np.ndarray:
        """Return tokens and tiles of the samples from number ``first`` on, int64 [count, 2].

        Only the survey is read. Tokens are those of the sample's text, image tokens included.
        """
        return self._stream(split).costs(np.arange(first, first + count, dtype=np.int64))

    def text(self, split: str, number: int) -> Text:
        """Return the tokens of a sample; the survey gives its images' tiles, so no image is read.

        Raises:
            ValueError: the sample is not what the survey found; the message names shard and key.
            OSError: the shard cannot be read, even after several tries; the message names it.
        """
        with self._sample(split, number) as (dataset, index, survey):
            record = dataset.record(dataset.raw(index, images=False), self._encoder.prompt)
            text = self._encoder.text(record, survey.tiles_of_images(index))
            _check(len(text.input_ids), survey.tokens[index], "tokens")
        return text

    def tiles(self, split: str, number: int) -> torch.Tensor:
        """Return the tiles of a sample, uint8 [n, 3, tile, tile]; n is 0 for text only.

        Raises:
            ValueError, OSError: as for `text`.
        """
        with self._sample(split, number) as (dataset, index, survey):
            raw = dataset.raw(index)
            record = dataset.record(raw, self._encoder.prompt)
            tiles = self._encoder.tiles([raw[name] for name in record.images])
            _check(len(tiles), survey.tiles[index], "tiles")
        return tiles

    def words(self, tokens: list[int]) -> str:
        """Return an answer's tokens as text."""
        return self._encoder.chat.words(tokens)

    def name(self, split: str, number: int) -> str:
        """Return the place of a sample: ``data set/shard/key``."""
        dataset, index, _ = self._stream(split).locate(number)
        return str(dataset.path / dataset.name(index))

    def left_out(self, split: str) -> dict[str, int]:
        """Return how many samples of the data have no number, by reason."""
        return self._stream(split).left_out

    @contextmanager
    def _sample(self, split: str, number: int) -> Iterator[tuple[DataSet, int, Survey]]:
        """Locate a sample; an error names it if it is not what the survey found."""
        dataset, index, survey = self._stream(split).locate(number)
        try:
            yield dataset, index, survey
        except ValueError as error:
            raise ValueError(
                f"{dataset.path / dataset.name(index)} has changed since the survey: {error}"
            ) from error

    def _stream(self, split: str) -> _Stream:
        if split not in self._streams:
            given = self._arguments
            opened, surveys = open_split(given["path"], split), []
            for dataset in opened.datasets:
                folder = given["surveys"] and Path(given["surveys"])
                survey = load_survey(dataset, self._encoder, folder)
                if survey is None:
                    raise ValueError(
                        f"{dataset.path}: no survey of {split} with this tokenizer, template and "
                        f"tiling; make one: {self._survey_command()}"
                    )
                surveys.append(survey)
            pairs = list(zip(opened.datasets, surveys, strict=True))
            stream = _Stream(pairs, opened.mode, given["seq_length"], (given["seed"], split))
            bad = sum(stream.left_out.values()) - stream.left_out.get(Excluded.kind, 0)
            if bad and given["bad_samples"] == "refuse":
                more = f"; and {bad - NAMED} more" if bad > NAMED else ""
                raise ValueError(
                    f"{given['path']}: {bad} bad samples in {split}: "
                    f"{'; '.join(stream.bad_names(NAMED))}{more}"
                )
            self._streams[split] = stream
        return self._streams[split]

    def _survey_command(self) -> str:
        given = self._arguments
        words = ["python", "-m", __package__, given["path"]]
        for name in ("tokenizer", "tile", "tokens_per_tile", "max_tiles", "prompt", "image_token"):
            words += [f"--{name.replace('_', '-')}", given[name]]
        words += [] if given["thumbnail"] else ["--no-thumbnail"]
        words += ["--surveys", given["surveys"]] if given["surveys"] else []
        return shlex.join(map(str, words))


class _Stream:
    """The numbered samples of a split.

    Args:
        pairs: the data sets, and the survey of each.
        mode, seed: see `Order`.
        seq_length: tokens that a sample may have.
    """

    def __init__(
        self,
        pairs: list[tuple[DataSet, Survey]],
        mode: Mode,
        seq_length: int,
        seed: tuple[int, str],
    ) -> None:
        self.left_out: dict[str, int] = {}
        self._pairs, self._seq_length, self._samples = pairs, seq_length, []
        for dataset, survey in pairs:
            chosen = np.arange(dataset.subset.start, dataset.subset.stop)
            states = survey.states(seq_length)[chosen]
            for state in np.unique(states[states != GOOD]):
                found = self.left_out.get(STATES[state], 0)
                self.left_out[STATES[state]] = found + int((states == state).sum())
            if not (states == GOOD).any():
                raise ValueError(
                    f"{dataset.path}: none of {len(chosen)} samples of {seed[1]} can be used: "
                    f"{self.left_out}; a sequence has {seq_length} tokens"
                )
            self._samples.append(chosen[states == GOOD])
        sizes = [len(samples) for samples in self._samples]
        self.order = Order(sizes, mode, [dataset.weight for dataset, _ in pairs], seed)
        by_set = list(zip(pairs, self._samples, strict=True))
        means = [survey.tiles[samples].mean() for (_, survey), samples in by_set]
        self.mean_tiles = float(np.average(means, weights=self.order.shares))
        blend = [
            [survey.fingerprint, dataset.weight, dataset.subset.start, dataset.subset.stop, size]
            for ((dataset, survey), _), size in zip(by_set, sizes, strict=True)
        ]
        self.fingerprint = hashlib.sha256(json.dumps([mode, blend, seed]).encode()).hexdigest()

    def locate(self, number: int) -> tuple[DataSet, int, Survey]:
        """Return a sample's data set, its index there, and the data set's survey."""
        (which,), (sample,) = self.order.locate(np.array([number], np.int64))
        dataset, survey = self._pairs[which]
        return dataset, int(self._samples[which][sample]), survey

    def costs(self, numbers: np.ndarray) -> np.ndarray:
        """Return tokens and tiles of samples by number, int64 [n, 2]."""
        costs = np.empty((len(numbers), 2), np.int64)
        which, sample = self.order.locate(numbers)
        for place, (_, survey) in enumerate(self._pairs):
            here = which == place
            indices = self._samples[place][sample[here]]
            costs[here, 0], costs[here, 1] = survey.tokens[indices], survey.tiles[indices]
        return costs

    def bad_names(self, most: int) -> list[str]:
        """Name ``most`` bad samples as ``shard/key: reason``."""
        bad = [
            sample
            for dataset, survey in self._pairs
            for sample in bad_samples(dataset, survey, self._seq_length, most)
        ]
        return [f"{sample.name}: {sample.reason}" for sample in bad[:most]]


def _check(found: int, surveyed: int, unit: str) -> None:
    if found != surveyed:
        raise ValueError(f"{found} {unit}, but {surveyed} in the survey")
