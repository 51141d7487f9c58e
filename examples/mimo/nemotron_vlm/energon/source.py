# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of energon's data sets, each a function of (data, seed, split, number)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from examples.mimo.nemotron_vlm.data.sample import SampleSource
from examples.mimo.nemotron_vlm.data.text import Text
from examples.mimo.nemotron_vlm.energon.conversation import IMAGE, Chat
from examples.mimo.nemotron_vlm.energon.encoding import Encoder
from examples.mimo.nemotron_vlm.energon.order import Order
from examples.mimo.nemotron_vlm.energon.records import DEFAULT_PROMPT
from examples.mimo.nemotron_vlm.energon.store import DataSet, open_split
from examples.mimo.nemotron_vlm.energon.survey import (
    EXCLUDED,
    GOOD,
    STATES,
    Survey,
    load_survey,
)
from examples.mimo.nemotron_vlm.energon.tiling import Tiling

NAMED = 3
"""Number of bad samples that a refusal names."""

TOO_LONG = "too long"


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
        image_token, pad_token: token ids.
        vocab_size: above every token id.
        tiles_per_sample: mean over the training split.
        fingerprint: hash of the training split's samples, their tokens and tiles, and their order;
            the same wherever the data lies, and for every sequence length that leaves out the same
            samples.
        score: None: an answer counts as a whole.
    """

    score = None

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
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        chat = Chat(tokenizer, image_token)
        self._encoder = Encoder(chat, Tiling(tile, max_tiles, thumbnail), tokens_per_tile, prompt)
        self._path = path
        self._seq_length = seq_length
        self._seed = seed
        self._refuse = bad_samples == "refuse"
        self._surveys = Path(surveys) if surveys else None
        self._streams: dict[str, _Stream] = {}
        self.image_token, self.pad_token = chat.image_token, chat.pad_token
        self.vocab_size = chat.vocab_size
        train = self._stream("train")
        self.tiles_per_sample = train.mean_tiles
        self.fingerprint = train.fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (type(self), self._arguments)

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
        dataset, index, survey = self._stream(split).locate(number)
        counts = survey.tiles_of_images(index)

        def read(images: bool) -> Text:
            record = self._encoder.record(dataset.decode(dataset.raw(index, images)))
            text = self._encoder.text(record, counts)
            _check(len(text.input_ids), survey.tokens[index], "tokens")
            return text

        with _naming(dataset, index):
            try:
                return read(images=False)
            except ValueError:  # the data set's own sample_loader may need the images
                return read(images=True)

    def tiles(self, split: str, number: int) -> torch.Tensor:
        """Return the tiles of a sample, uint8 [n, 3, tile, tile]; n is 0 for text only.

        Raises:
            ValueError, OSError: as for `text`.
        """
        dataset, index, survey = self._stream(split).locate(number)
        with _naming(dataset, index):
            tiles = self._encoder.tiles(self._encoder.record(dataset.decode(dataset.raw(index))))
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

    def left_out_names(self, split: str, most: int) -> list[str]:
        """Name ``most`` of these as ``shard/key: reason``; none that ``split.yaml`` excludes."""
        return self._stream(split).names(most)

    def _stream(self, split: str) -> _Stream:
        if split not in self._streams:
            self._streams[split] = stream = self._open(split)
            bad = sum(stream.left_out.values()) - stream.left_out.get(STATES[EXCLUDED], 0)
            if self._refuse and bad:
                del self._streams[split]
                names = "; ".join(stream.names(NAMED))
                more = f"; and {bad - NAMED} more" if bad > NAMED else ""
                raise ValueError(f"{self._path}: {bad} bad samples in {split}: {names}{more}")
        return self._streams[split]

    def _open(self, split: str) -> _Stream:
        opened = open_split(self._path, split)
        surveys = []
        for dataset in opened.datasets:
            survey = load_survey(dataset, self._encoder, self._surveys)
            if survey is None:
                raise ValueError(
                    f"{dataset.path}: no survey of {split} with this tokenizer, template and "
                    f"tiling; make one: {self._survey_command()}"
                )
            surveys.append(survey)
        seed = (self._seed, split)
        return _Stream(opened.datasets, surveys, opened.mode, self._seq_length, seed)

    def _survey_command(self) -> str:
        given = self._arguments
        options = ["--tokenizer", given["tokenizer"], "--tile", given["tile"]]
        options += ["--tokens-per-tile", given["tokens_per_tile"], "--max-tiles"]
        options += [given["max_tiles"], *([] if given["thumbnail"] else ["--no-thumbnail"])]
        defaults = {"prompt": DEFAULT_PROMPT, "image_token": IMAGE, "surveys": None}
        for name, default in defaults.items():
            if given[name] != default:
                options += [f"--{name.replace('_', '-')}", repr(str(given[name]))]
        return " ".join(map(str, ["python -m", __package__, self._path, *options]))


class _Stream:
    """The numbered samples of a split.

    Args:
        datasets, surveys: the data sets, and the survey of each.
        mode, seed: see `Order`.
        seq_length: tokens that a sample may have.
    """

    def __init__(
        self,
        datasets: list[DataSet],
        surveys: list[Survey],
        mode: Literal["single", "weights", "repetitions"],
        seq_length: int,
        seed: object,
    ) -> None:
        self.left_out: dict[str, int] = {}
        self._datasets, self._surveys, self._seq_length = datasets, surveys, seq_length
        self._samples = []
        for dataset, survey in zip(datasets, surveys, strict=True):
            chosen = np.arange(dataset.subset.start, dataset.subset.stop)
            state, tokens = survey.state[chosen], survey.tokens[chosen]
            good, fits = state == GOOD, tokens <= seq_length
            for kind in range(1, len(STATES)):
                self._count(STATES[kind], int((state == kind).sum()))
            self._count(TOO_LONG, int((good & ~fits).sum()))
            if not (good & fits).any():
                raise ValueError(
                    f"{dataset.path}: none of {len(chosen)} samples of {seed[1]} can be used: "
                    f"{self.left_out}; a sequence has {seq_length} tokens"
                )
            self._samples.append(chosen[good & fits])
        sizes = [len(samples) for samples in self._samples]
        self.order = Order(sizes, mode, [dataset.weight for dataset in datasets], seed)
        means = [
            survey.tiles[samples].mean()
            for survey, samples in zip(surveys, self._samples, strict=True)
        ]
        self.mean_tiles = float(np.average(means, weights=self.order.shares))
        blend = [
            [survey.fingerprint, dataset.weight, dataset.subset.start, dataset.subset.stop, size]
            for survey, dataset, size in zip(surveys, datasets, sizes, strict=True)
        ]
        self.fingerprint = hashlib.sha256(json.dumps([mode, blend, seed]).encode()).hexdigest()

    def locate(self, number: int) -> tuple[DataSet, int, Survey]:
        """Return a sample's data set, its index there, and the data set's survey."""
        (dataset,), (sample,) = self.order.locate(np.array([number], np.int64))
        index = int(self._samples[dataset][sample])
        return self._datasets[dataset], index, self._surveys[dataset]

    def costs(self, numbers: np.ndarray) -> np.ndarray:
        """Return tokens and tiles of samples by number, int64 [n, 2]."""
        costs = np.empty((len(numbers), 2), np.int64)
        dataset, sample = self.order.locate(numbers)
        for place, (survey, samples) in enumerate(zip(self._surveys, self._samples, strict=True)):
            here = dataset == place
            indices = samples[sample[here]]
            costs[here, 0], costs[here, 1] = survey.tokens[indices], survey.tiles[indices]
        return costs

    def names(self, most: int) -> list[str]:
        """See `EnergonSource.left_out_names`."""
        names = []
        for dataset, survey in zip(self._datasets, self._surveys, strict=True):
            bad = [s for s in survey.bad if s.index in dataset.subset and s.state != EXCLUDED]
            names += [f"{sample.name}: {sample.reason}" for sample in bad[: most - len(names)]]
            long = np.flatnonzero(survey.tokens > self._seq_length)
            long = [int(index) for index in long if index in dataset.subset]
            for index in long[: most - len(names)]:
                tokens = survey.tokens[index]
                names.append(f"{dataset.name(index)}: {tokens} tokens, {self._seq_length} fit")
        return names

    def _count(self, reason: str, samples: int) -> None:
        if samples:
            self.left_out[reason] = self.left_out.get(reason, 0) + samples


@contextmanager
def _naming(dataset: DataSet, index: int) -> Iterator[None]:
    """Name the sample in the error if it is not what the survey found."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{dataset.path / dataset.name(index)} has changed since the survey: {error}"
        ) from error


def _check(found: int, surveyed: int, unit: str) -> None:
    if found != surveyed:
        raise ValueError(f"{found} {unit}, but {surveyed} in the survey")


def _make(kind: type[EnergonSource], arguments: dict[str, Any]) -> EnergonSource:
    return kind(**arguments)
