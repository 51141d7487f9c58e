# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of shards and of files, each a function of (data, seed, split, number)."""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from examples.mimo.nemotron_vlm.data.sample import Question, SampleSource, Text
from examples.mimo.nemotron_vlm.energon.chat_template import MODES
from examples.mimo.nemotron_vlm.energon.conversation import KINDS_OF, PLACEHOLDERS
from examples.mimo.nemotron_vlm.energon.encoding import Encoder, read_files
from examples.mimo.nemotron_vlm.energon.errors import Excluded
from examples.mimo.nemotron_vlm.energon.files import SMALL, FileSet
from examples.mimo.nemotron_vlm.energon.images import Tiling
from examples.mimo.nemotron_vlm.energon.records import Record
from examples.mimo.nemotron_vlm.energon.store import DataSet, open_split
from examples.mimo.nemotron_vlm.energon.stream import Stream
from examples.mimo.nemotron_vlm.energon.survey import (
    GOOD,
    STATES,
    TOO_LONG,
    NoSurvey,
    Survey,
    bad_samples,
    checksum,
    load_survey,
    make_survey,
    text_sum,
)
from examples.mimo.nemotron_vlm.model.names import IMAGES
from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME

NAMED = 3
"""Number of bad samples that a refusal names."""


class EnergonSource(SampleSource):
    """Samples of a data set or a blend that has been surveyed, or of a small file of records.

    ``split`` is 'train' or 'test', which is energon's ``val`` (or ``test`` if that is empty).
    Samples can be read in forked processes.

    Args:
        path: as `open_split` takes it.
        bad_samples: 'skip' leaves bad samples out of the numbering, 'refuse' raises.
        long_samples: the same for those that are too long; 'cut' cuts off tokens after the last of
            a sample's media and the first of an answer, and skips samples that need more.
        surveys: directory of the surveys; by default that of energon's metadata.

    Raises:
        NoSurvey: there is no survey of the data with these settings.
        ValueError: the data is missing or unfit; or it has samples that are to be refused. The
            message is one line.

    Attributes:
        fingerprint: hash of the training split's samples, their tokens and images, and their order;
            the same wherever the data lies, and for every sequence length that leaves out the same
            samples.
    """

    def __init__(
        self,
        path: str | Path,
        encoder: Encoder,
        seq_length: int,
        seed: int,
        bad_samples: Literal["skip", "refuse"] = "skip",
        surveys: str | Path | None = None,
        long_samples: Literal["skip", "refuse", "cut"] = "skip",
    ) -> None:
        self._path, self._encoder, self._seq_length, self._seed = path, encoder, seq_length, seed
        self._surveys = Path(surveys) if surveys else None
        self._bad_samples, self._long_samples = bad_samples, long_samples
        self._streams: dict[str, Stream] = {}
        self._parts: dict[str, str] = {}
        self.token_ids, self.pad_token = encoder.chat.ids, encoder.chat.pad_token
        self.vocab_size = encoder.chat.vocab_size
        self.fingerprint = self._stream("train").fingerprint
        (asked, *others) = {*self._stream("train").asked}
        self.asked = {} if others or asked == len(MODES) else MODES[asked]

    def epoch_size(self, split: str) -> int | None:
        """Return the samples of an epoch; None for a blend by weight, which has no epochs."""
        return self._stream(split).order.epoch_size

    def costs(self, split: str, first: int, count: int) -> np.ndarray:
        """Return tokens and inputs of the samples from number ``first`` on, int64 [count, 2].

        Only the survey is read. Inputs are tiles or whole images. Tokens are those of the sample's
        text, image tokens included.
        """
        return self._stream(split).costs(first, count)

    def sizes(self, split: str, first: int, count: int, encoder: str) -> list[np.ndarray]:
        """See `SampleSource`; only the survey is read."""
        if encoder == IMAGES and isinstance(self._encoder.images, Tiling):
            return super().sizes(split, first, count, encoder)
        return self._stream(split).sizes(first, count, encoder)

    def text(self, split: str, number: int) -> Text:
        """Return the tokens of a sample; the survey gives the sizes of images and sounds, so none
        is read.

        Raises:
            ValueError: the sample is not what the survey found; the message names shard and key.
            OSError: the shard cannot be read, even after several tries; the message names it.
        """
        with self._sample(split, number) as (dataset, index, survey):
            raw = dataset.raw(index, kinds=())
            if text_sum(raw) != survey.sums[index]:
                raise ValueError("its text differs from the survey's")
            record = dataset.record(raw, self._encoder.prompt)
            text = self._encoder.text(record, [extent for extent, _ in survey.media_of(index)])
            found, surveyed = len(text.input_ids), survey.tokens[index]
            if found != surveyed:
                raise ValueError(f"{found} tokens, but {surveyed} in the survey")
        return Text(*(part[: self._seq_length] for part in text))

    def inputs(
        self, split: str, number: int, encoder: str
    ) -> torch.Tensor | Sequence[torch.Tensor]:
        """See `SampleSource`; raises as `text` does."""
        with self._sample(split, number) as (dataset, index, survey):
            raw = dataset.raw(index, KINDS_OF[encoder])
            media = dataset.record(raw, self._encoder.prompt).media
            files = read_files(raw, [each for each in media if each.kind in KINDS_OF[encoder]])
            media = self._encoder.read(files)
            pairs = zip(media, files, strict=True)
            found = [(read.extent, checksum(file.files)) for read, file in pairs]
            if found != survey.media_of(index, encoder):
                raise ValueError(f"its {encoder} differ from the survey's")
            return self._encoder.inputs(media, encoder)

    def question(self, split: str, number: int) -> Question | None:
        """See `SampleSource`; raises as `text` does."""
        record, question = self._asked(split, number)
        is_alone = [turn.role for turn in record.turns] == ["user", "assistant"]
        return question if is_alone and not record.arguments else None

    def shown(self, split: str, number: int) -> Question:
        """See `SampleSource`: all turns before the last one, with all media."""
        return self._asked(split, number)[1]

    def _asked(self, split: str, number: int) -> tuple[Record, Question]:
        with self._sample(split, number) as (dataset, index, survey):
            raw = dataset.raw(index)
            record = dataset.record(raw, self._encoder.prompt)
        media = [
            (PLACEHOLDERS[each.kind].strip("<>"), {name: raw[name] for name in each.files})
            for each in record.media
        ]
        *asked, answer = (turn.text for turn in record.turns)
        mode = (*MODES, {})[survey.asked[index]]
        return record, Question("\n".join(asked), media, mode, answer)

    def words(self, tokens: list[int]) -> str:
        """Return an answer's tokens as text."""
        return self._encoder.chat.words(tokens)

    def name(self, split: str, number: int) -> str:
        """Return the place of a sample: ``data set/shard/key``."""
        dataset, index, _ = self._stream(split).locate(number)
        return str(dataset.path / dataset.name(index))

    def part(self, split: str) -> str:
        """Return energon's name for a split."""
        self._stream(split)
        return self._parts[split]

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
                f"{self.name(split, number)} has changed since the survey: {error}"
            ) from error

    def _stream(self, split: str) -> Stream:
        if split not in self._streams:
            opened, surveys = open_split(self._path, split), []
            for dataset in opened.datasets:
                surveys.append(self._survey(dataset))
                if surveys[-1] is None:
                    kind = type(self._encoder.images).__name__.lower()
                    raise NoSurvey(
                        f"{dataset.path}: no survey of {opened.part} with this tokenizer, template "
                        f"and {kind}"
                    )
            pairs = list(zip(opened.datasets, surveys, strict=True))
            _refuse_missing_shards(pairs)
            cut = self._long_samples == "cut"
            stream = Stream(pairs, opened.by_weight, self._seq_length, (self._seed, split), cut)
            left, long = stream.left_out, stream.left_out[STATES[TOO_LONG]]
            if self._bad_samples == "refuse":
                self._refuse(opened.part, pairs, left.total() - left[Excluded.kind] - long, "bad")
            if self._long_samples == "refuse":
                self._refuse(opened.part, pairs, long, "long")
            self._streams[split], self._parts[split] = stream, opened.part
        return self._streams[split]

    def _survey(self, dataset: DataSet) -> Survey | None:
        """Load a survey; make it for a small file of records, on the first rank that comes."""
        known = dataset, self._encoder, self._surveys
        survey = load_survey(*known)
        if survey or not isinstance(dataset, FileSet) or dataset.ends[-1] > SMALL:
            return survey
        folder = self._surveys or dataset.path / MAIN_FOLDER_NAME
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "surveying.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the end of the process frees it, too
            return load_survey(*known) or make_survey(*known)

    def _refuse(
        self, part: str, pairs: list[tuple[DataSet, Survey]], count: int, kind: str
    ) -> None:
        """Raise if there are bad or long samples, and name the first of them."""
        named = [
            f"{sample.name}: {sample.reason}"
            for pair in pairs
            for sample in bad_samples(*pair, self._seq_length, NAMED)
            if (sample.state == TOO_LONG) == (kind == "long")
        ][:NAMED]
        named += [f"and {count - NAMED} more"] * (count > NAMED)
        if count:
            raise ValueError(
                f"{self._path}: {count} {kind} samples in {part}: {'; '.join(named)}; leave them "
                f"out with --{kind}-samples skip"
            )


def _refuse_missing_shards(pairs: list[tuple[DataSet, Survey]]) -> None:
    """Raise if shards are not there that had good samples when the data was surveyed."""
    for dataset, survey in pairs:
        ranges = zip(dataset.shards, dataset.ends, dataset.ends[1:], strict=False)
        missing = [
            shard.name
            for shard, first, end in ranges
            if not (dataset.path / shard.name).exists() and (survey.state[first:end] == GOOD).any()
        ]
        if missing:
            raise ValueError(
                f"{dataset.path}: {len(missing)} shards are missing: {', '.join(missing[:NAMED])}; "
                "bring them back, or survey with --again, which leaves their samples out"
            )
