# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The survey of a data set: tokens, images, sounds and clips of every sample, or why it is bad.

Making it reads and decodes everything once. Its file names hash everything that it depends on, so a
survey made for other data, another tokenizer, other tiles or grids is not found; it does not depend
on the sequence length. Each data set has, beside energon's own metadata or in a separate directory:

- ``survey-NAME.npy``, int32 [7, samples]: state, tokens and inputs (tiles, or whole images) of each
  sample, the cumulative number of media, its own included, the tokens to which it may be cut, a
  checksum of its text, and what asks for its answer;
- ``survey-NAME.media.npy``, `MEDIA` [media]: kind of each image, sound and clip, as an index into
  `KINDS`, its extent, and a checksum; the size of an image is its number of tiles, or its grid;
- ``survey-NAME.json``: the bad samples and a hash of all samples' bytes.
"""

import hashlib
import json
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from examples.mimo.common.errors import one_line
from examples.mimo.nemotron_vlm.energon.conversation import KINDS_OF, PLACEHOLDERS
from examples.mimo.nemotron_vlm.energon.encoding import Encoder, read_files
from examples.mimo.nemotron_vlm.energon.errors import (
    UNUSABLE,
    BadConversation,
    Excluded,
)
from examples.mimo.nemotron_vlm.energon.records import kind_of
from examples.mimo.nemotron_vlm.energon.store import DataSet
from examples.mimo.nemotron_vlm.energon.units import Unit, load_unit, save_unit, write
from examples.mimo.nemotron_vlm.energon.videos import Extent
from megatron.core.dist_checkpointing.managed_queue import end_with_rank
from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME

FORMAT = 9
STATES = ("good", "unreadable shard", "bad text", "bad image", "bad sound", "bad video")
STATES += (Excluded.kind, "too long")
"""Names of the states; a survey does not depend on the sequence length, and has no 'too long'."""
KINDS = tuple(PLACEHOLDERS)
MEDIA = [("kind", "i1"), ("size", "i8"), ("frames", "i4"), ("fps", "f8"), ("sum", "i4")]
MEDIA = np.dtype(MEDIA)
GOOD, TOO_LONG = map(STATES.index, ("good", "too long"))
MEDIA_SUFFIX = ".media.npy"
UNITS = "surveyed"
"""Folder, beside surveys, of the files of their units."""


class NoSurvey(ValueError):
    """A data set that has not been surveyed with these settings."""


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be used.

    index: its index in the data set. name: shard/key. state: index into STATES. reason: one line.
    """

    index: int
    name: str
    state: int
    reason: str


@dataclass(frozen=True)
class Survey:
    """The survey of a data set.

    state, tokens, inputs: int32 [samples of the data set], memory-mapped from the file.

    media_ends: int32 [samples], cumulative number of media, each sample's own included.
    needed: int32 [samples], tokens up to the last of its media and the first of an answer.
    sums: int32 [samples], `text_sum` of each. asked: int32 [samples], `Encoder.asked` of each.
    media: `MEDIA` [media].
    fingerprint: hash of the samples' bytes and of the settings that determine tokens and media;
    the same for a copy of the data. notes: the file that has the bad samples.
    """

    state: np.ndarray
    tokens: np.ndarray
    inputs: np.ndarray
    media_ends: np.ndarray
    needed: np.ndarray
    sums: np.ndarray
    asked: np.ndarray
    media: np.ndarray
    fingerprint: str
    notes: Path

    @cached_property
    def bad(self) -> list[BadSample]:
        """The samples that cannot be used; to start, a training does not read them."""
        return [BadSample(**entry) for entry in json.loads(self.notes.read_text())["bad"]]

    def media_of(self, index: int, encoder: str | None = None) -> list[tuple[Extent, int]]:
        """Return the extent and `checksum` of each of a sample's media, or of an encoder's."""
        first = self.media_ends[index - 1] if index else 0
        media = self.media[first : self.media_ends[index]]
        kinds = [KINDS.index(kind) for kind in KINDS_OF[encoder]] if encoder else range(len(KINDS))
        return [(Extent(*of), crc) for kind, *of, crc in media.tolist() if kind in kinds]

    def media_in(
        self, indices: np.ndarray, kinds: Collection[str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the sizes of media of some kinds in samples, int64 [media], and their number in
        each sample, int64 [samples]."""
        ends = self.media_ends[indices]
        counts = ends - np.where(indices, self.media_ends[indices - 1], 0)
        last = np.cumsum(counts)
        media = self.media[np.repeat(ends - last, counts) + np.arange(counts.sum())]
        own = np.isin(media["kind"], [KINDS.index(kind) for kind in kinds])
        before = np.append(0, np.cumsum(own))
        return media["size"][own], np.diff(before[np.append(0, last)])

    def states(self, seq_length: int, cut: bool = False, part: slice = slice(None)) -> np.ndarray:
        """Return the states of samples, int32; those that need more tokens are too long.

        Args:
            cut: whether samples need only the tokens to which they may be cut.
            part: the samples; all by default.
        """
        tokens = self.needed if cut else self.tokens
        return np.where(tokens[part] > seq_length, TOO_LONG, self.state[part])


def checksum(contents: Iterable[bytes]) -> int:
    """Return the CRC-32 of files' contents, without its highest bit: int32 has no place for it."""
    crc = 0
    for content in contents:
        crc = zlib.crc32(content, crc)
    return crc & 0x7FFFFFFF


def text_sum(raw: Mapping[str, Any]) -> int:
    """Return the `checksum` of a sample's files that are no media."""
    return checksum(raw[n] for n in sorted(raw) if not n.startswith("__") and kind_of(n) is None)


def bad_samples(
    dataset: DataSet, survey: Survey, seq_length: int, most_long: int
) -> list[BadSample]:
    """Return the samples that cannot be used, in the part of the data set that a blend takes.

    Samples that ``split.yaml`` excludes are not meant to be used, so they are not bad.

    Args:
        most_long: how many of the samples that are too long to return; each is looked up by name.
    """
    bad = [sample for sample in survey.bad if STATES[sample.state] != Excluded.kind]
    long = [i for i in np.flatnonzero(survey.tokens > seq_length).tolist() if i in dataset.subset]
    for index in long[:most_long]:
        reason = f"{survey.tokens[index]} tokens, {seq_length} fit"
        bad.append(BadSample(index, dataset.name(index), TOO_LONG, reason))
    return [sample for sample in bad if sample.index in dataset.subset]


def load_survey(dataset: DataSet, encoder: Encoder, folder: Path | None = None) -> Survey | None:
    """Load the survey of a data set; return None if there is none.

    Args:
        folder: directory of surveys; by default that of energon's metadata.

    Raises:
        OSError: the survey cannot be read; the message names the data set.
    """
    try:
        path = _path(dataset, encoder, folder)
        if not path.is_file():
            return None
        rows = np.load(path, mmap_mode="r")
        media = np.load(path.with_suffix(MEDIA_SUFFIX), mmap_mode="r")
        notes = path.with_suffix(".json")
        fingerprint = json.loads(notes.read_text())["fingerprint"]
    except (OSError, ValueError, KeyError) as error:
        raise OSError(f"{dataset.path}: its survey cannot be read: {one_line(error)}") from error
    return Survey(*rows, media, fingerprint, notes)


def make_survey(
    dataset: DataSet,
    encoder: Encoder,
    folder: Path | None = None,
    workers: int = 0,
    again: bool = False,
) -> Survey:
    """Survey a data set, and load its survey.

    Args:
        folder: as for `load_survey`.
        workers: most processes, which take a shard at a time; 0 for this one alone. No more are
            started than there are shards.
        again: whether to read shards that earlier surveys have read.

    Raises:
        OSError: the file system refuses to read a shard, or a package is missing.
    """
    path = _path(dataset, encoder, folder)
    (path.parent / UNITS).mkdir(parents=True, exist_ok=True)
    loader = DataLoader(
        _Units(dataset, encoder, path.parent / UNITS, again),
        batch_size=None,
        collate_fn=tuple,
        num_workers=min(workers, len(dataset.shards)),
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=lambda _number: end_with_rank(),
    )
    units = list(tqdm(loader, str(dataset.path), unit="shard", disable=None))
    rows, media, bad, digests = zip(*units, strict=True)
    digest = hashlib.sha256(json.dumps([FORMAT, encoder.settings]).encode())
    digest.update("".join(digests).encode())
    notes = {
        "settings": encoder.settings,
        "fingerprint": digest.hexdigest(),
        "bad": [
            entry | {"index": first + entry["index"]}
            for first, entries in zip(dataset.ends, bad, strict=False)
            for entry in entries
        ],
    }
    table = np.concatenate(rows, axis=1)
    table[3] = np.cumsum(table[3])
    text = json.dumps(notes, indent=1).encode()
    write(path.with_suffix(".json"), lambda file: file.write(text))
    write(path.with_suffix(MEDIA_SUFFIX), lambda file: np.save(file, np.concatenate(media)))
    write(path, lambda file: np.save(file, table))  # if it is there, the survey is complete
    return load_survey(dataset, encoder, folder)


class _Units(Dataset):
    """A data set of units: the survey reads a shard, and keeps what it finds in a file.

    The file's name hashes all that the unit depends on.
    """

    def __init__(self, dataset: DataSet, encoder: Encoder, folder: Path, again: bool) -> None:
        self.dataset, self.encoder, self.folder, self.again = dataset, encoder, folder, again
        self.settings = json.dumps([FORMAT, encoder.settings])

    def __len__(self) -> int:
        return len(self.dataset.shards)

    def __getitem__(self, number: int) -> Unit:
        try:
            depends = self.settings + self.dataset.state_of(number)
        except FileNotFoundError:  # no sample can be read
            return self._made(number)
        path = self.folder / f"{hashlib.sha256(depends.encode()).hexdigest()[:32]}.npz"
        unit = None if self.again else load_unit(path)
        if unit is None:
            unit = self._made(number)
            save_unit(path, unit)
        return unit

    def _made(self, number: int) -> Unit:
        """Read, encode and decode all samples of a shard."""
        dataset, encoder = self.dataset, self.encoder
        indices = range(dataset.ends[number], dataset.ends[number + 1])
        rows = np.zeros((7, len(indices)), np.int32)
        media, bad = [], []
        digest = hashlib.blake2b(digest_size=16)
        for place, index in enumerate(indices):
            try:
                raw = dataset.raw(index)
                for name, content in sorted(raw.items()):
                    if not name.startswith("__"):
                        digest.update(f"{raw['__key__']}.{name} {len(content)}\n".encode())
                        digest.update(content)
                record = dataset.record(raw, encoder.prompt)
                files = read_files(raw, record.media)
                decoded = encoder.read(files, whole=False)
                extents = [each.extent for each in decoded]
                text = encoder.text(record, extents)
                sizes = encoder.count(decoded), len(decoded), encoder.needed(text)
                asked = encoder.asked(record, extents, text)
                rows[:, place] = GOOD, len(text.input_ids), *sizes, text_sum(raw), asked
                media += [
                    (KINDS.index(each.kind), *each.extent, checksum(file.files))
                    for each, file in zip(decoded, files, strict=True)
                ]
            except (KeyboardInterrupt, SystemExit, OSError):  # these do not blame the data
                raise
            except BaseException as error:  # a tokenizer in Rust panics with no Exception
                kind, reason = BadConversation.kind, f"{type(error).__name__}: {one_line(error)}"
                if isinstance(error, UNUSABLE):
                    kind, reason = error.kind, one_line(error)
                state = rows[0, place] = STATES.index(kind)
                bad.append(asdict(BadSample(place, dataset.name(index), int(state), reason)))
                digest.update(f"{place} {state}\n".encode())
        return rows, np.array(media, MEDIA), bad, digest.hexdigest()


def _path(dataset: DataSet, encoder: Encoder, folder: Path | None) -> Path:
    shards = [(shard.name, shard.count) for shard in dataset.shards]
    depends = json.dumps([FORMAT, encoder.settings, shards, dataset.configuration])
    name = hashlib.sha256(depends.encode()).hexdigest()[:16]
    return (folder or dataset.path / MAIN_FOLDER_NAME) / f"survey-{name}.npy"
