# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Random access to energon's data sets: the samples of a split by index."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from examples.mimo.nemotron_vlm.energon.conversation import BadConversation
from examples.mimo.nemotron_vlm.energon.records import UNREAD, TextDecoder, is_image, known_kind
from megatron.energon import BaseWebdatasetFactory, WorkerConfig, load_dataset
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.config import (
    INDEX_SQLITE_FILENAME,
    INDEX_UUID_FILENAME,
    MAIN_FOLDER_NAME,
)
from megatron.energon.flavors.webdataset.empty_dataset_error import EmptyDatasetError
from megatron.energon.flavors.webdataset.indexing import SqliteIndexReader
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.flavors.webdataset.metadata import (
    check_dataset_info_present,
    get_info_shard_files,
)
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset

OPEN_SHARDS = 16
"""Shards of a data set that a process keeps open for text, and the same number for images."""

PAUSES_S = (1, 2, 4, 8, 16, 32)
"""Seconds to wait before each new try to read a shard that the file system refuses."""

logger = logging.getLogger(__name__)

Mode = Literal["single", "weights", "repetitions"]
MODES: dict[DatasetBlendMode, Mode] = {
    DatasetBlendMode.NONE: "single",
    DatasetBlendMode.DATASET_WEIGHT: "weights",
    DatasetBlendMode.SAMPLE_REPETITIONS: "repetitions",
}
PARTS = {"train": ("train",), "test": ("val", "test")}
"""Energon's names for each split; the first part that the data has is taken."""


class BadShard(ValueError):
    """A sample that cannot be read from its shard."""


class Unreadable(OSError):
    """A sample that the file system refuses to read, which does not mean that the data is bad."""


class Excluded(ValueError):
    """A sample that the data set's own ``split.yaml`` excludes."""


class Shard(NamedTuple):
    """A shard.

    name: its path in the data set. first: index of its first sample. count: its samples.
    """

    name: str
    first: int
    count: int


class EmptySplit(ValueError):
    """A split that the data does not have."""


class DataSet:
    """One data set of a split. Forked processes may read it: each opens its own files.

    Args:
        loaded: the data set as energon loaded it.

    Raises:
        ValueError: the data set is of a kind that cannot be read.
    """

    def __init__(self, loaded: LoadedDataset) -> None:
        factory = loaded.dataset
        if not isinstance(factory, BaseWebdatasetFactory):
            raise ValueError(f"a {type(factory).__name__} has no samples to read by index")
        self.path = Path(str(factory.path))
        if not known_kind(factory.__sample_type__):
            kind = factory.__sample_type__.__name__
            raise ValueError(
                f"{self.path}: samples are {kind}; CaptioningSample and CrudeWebdataset are read"
            )
        self.weight = loaded.weight if loaded.repetitions is None else loaded.repetitions
        self._factory = factory
        self._readers: dict[bool, tuple[int, ShardInfosITarReader]] = {}
        self._given_up: set[str] = set()
        firsts = [0]
        for shard in factory.shards:
            firsts.append(firsts[-1] + shard.count)
        self.shards = [
            Shard(shard.name, first, shard.count)
            for shard, first in zip(factory.shards, firsts, strict=False)
        ]
        self._firsts = firsts[:-1]
        self.size = firsts[-1]
        whole = range(self.size)
        subset = factory.subset
        self.subset = range(*subset.compute_subset(self.size)) if subset else whole

    @cached_property
    def _tar_files(self) -> list[str]:
        return get_info_shard_files(EPath(self.path))

    @cached_property
    def configuration(self) -> str:
        """Hash of energon's own files on which the samples depend, wherever they lie."""
        folder = self.path / MAIN_FOLDER_NAME
        patterns = (INDEX_UUID_FILENAME, ".info.*", "*.yaml", "*.py")
        files = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
        return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()

    def shard_of(self, index: int) -> Shard:
        """Return the shard that holds a sample."""
        return self.shards[bisect_right(self._firsts, index) - 1]

    def raw(self, index: int, images: bool = True) -> dict[str, Any]:
        """Return a sample's files as bytes, with energon's ``__key__``.

        Args:
            images: whether to read the images; otherwise `UNREAD` takes their place.

        Raises:
            BadShard: the shard is damaged or missing, or is not the one that was indexed.
            Unreadable: reads fail for another reason, even after the pauses of `PAUSES_S`; from
                then on, the shard's other samples are tried once each.
            Excluded: ``split.yaml`` excludes the sample.
        """
        shard = self.shard_of(index).name
        for pause in () if shard in self._given_up else PAUSES_S:
            try:
                return self._read(index, images)
            except Unreadable as error:
                logger.warning("%s: %s; next try in %d s", self.path / shard, error, pause)
                time.sleep(pause)
        try:
            return self._read(index, images)
        except Unreadable as error:
            self._given_up.add(shard)
            raise Unreadable(
                f"{self.path / shard} cannot be read, also after {sum(PAUSES_S)} s: {error}"
            ) from error

    def _read(self, index: int, images: bool) -> dict[str, Any]:
        reader = self._open_reader(images)
        try:
            raw = reader[index]
        except Exception as error:  # from tarfile, the file system or energon itself
            reader.close()
            del self._readers[images]
            line = " ".join(str(error).split()) or type(error).__name__
            raise (Unreadable if _may_pass(error) else BadShard)(line) from error
        for shard in reader.itar_files_cache.values():
            shard.members.clear()  # a tarfile remembers all that it ever read
        if raw is None:
            raise Excluded("excluded by split.yaml")
        return raw if images else raw | reader.part_filter.left_out()

    def decode(self, raw: dict[str, Any]) -> Any:
        """Return energon's sample for what `raw` returned: decoded, with its fields mapped.

        Raises:
            BadConversation: a field is missing, or text is damaged.
        """
        try:
            return self._factory.load_sample(dict(raw))
        except BadConversation:
            raise
        except Exception as error:  # from energon, or from the data set's own sample_loader
            raise BadConversation(" ".join(str(error).split())) from error

    def name(self, index: int) -> str:
        """Return ``shard/key`` of a sample from energon's index; the shard itself is not read."""
        shard = self.shard_of(index)
        database = self.path / MAIN_FOLDER_NAME / INDEX_SQLITE_FILENAME
        key = None
        if database.is_file():
            with SqliteIndexReader(EPath(database)) as samples:
                key = samples.db.select_one(
                    "SELECT sample_key FROM samples WHERE tar_file_id = ? AND sample_index = ?",
                    (self._tar_files.index(shard.name), index - shard.first),
                )
        return f"{shard.name}/{key[0] if key else index - shard.first}"

    def _open_reader(self, images: bool) -> ShardInfosITarReader:
        pid, reader = self._readers.get(images, (None, None))
        if pid != os.getpid():
            factory = self._factory
            parts = factory.part_filter
            reader = ShardInfosITarReader(
                factory.path,
                factory.shards,
                part_filter=parts if images else _NoImages(parts),
                sample_filter=factory.sample_filter,
                itar_cache_size=OPEN_SHARDS,
            )
            self._readers[images] = os.getpid(), reader
        return reader


def _may_pass(error: BaseException | None) -> bool:
    """Return whether the file system failed for another reason than a missing file."""
    while error and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None and not isinstance(error, FileNotFoundError)


class _NoImages:
    """A filter of a sample's files that skips images and records their names.

    Args:
        parts: the data set's own filter; None takes all files.
    """

    def __init__(self, parts: Callable[[str], bool] | None) -> None:
        self._parts, self._images = parts, []

    def __call__(self, name: str) -> bool:
        wanted = self._parts is None or self._parts(name)
        if wanted and is_image(name):
            self._images.append(name)
            return False
        return wanted

    def left_out(self) -> dict[str, Any]:
        """Return the images skipped since the last call, as `UNREAD` by name."""
        images, self._images = self._images, []
        return dict.fromkeys(images, UNREAD)


@dataclass(frozen=True)
class Split:
    """A split of a data set or blend. part: energon's name of it. mode: how the data sets share the
    samples. datasets: the data sets, with their weights or repetitions.
    """

    part: str
    mode: Mode
    datasets: list[DataSet]


def open_split(path: str | Path, split: str) -> Split:
    """Open a data set or a blend (``metadataset.yaml``) that ``energon prepare`` has prepared.

    Args:
        path: the directory of a data set, or the file of a blend.
        split: 'train' or 'test'; the latter is energon's ``val``, or ``test`` if that is empty.

    Raises:
        EmptySplit: the data has no such split.
        ValueError: the data is missing, not prepared, or of a kind that cannot be read.
    """
    path = Path(path).absolute()
    if not path.exists():
        raise ValueError(f"{path}: no such data set")
    if path.is_dir() and not check_dataset_info_present(EPath(path)):
        raise ValueError(f"{path}: not prepared; run: energon prepare {path}")
    single = WorkerConfig(rank=0, world_size=1, num_workers=0)
    with _one_line(path):
        loader = load_dataset(path)
        for part in PARTS[split]:
            try:
                loaded = loader.get_datasets(
                    training=True, split_part=part, worker_config=single, decoder=TextDecoder()
                )
            except (AssertionError, EmptyDatasetError, KeyError) as error:
                problem = error
                continue
            if any(entry.aux for entry in loaded.datasets):
                raise ValueError("auxiliary data sets are not read")
            datasets = [DataSet(entry) for entry in loaded.datasets]
            return Split(part, MODES[loaded.blend_mode], datasets)
    raise EmptySplit(f"{path}: has no samples for {' or '.join(PARTS[split])} ({problem!r})")


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # energon asserts what the user got wrong
        line = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(line if str(path) in line else f"{path}: {line}") from error
