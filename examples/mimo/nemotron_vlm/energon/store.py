# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Random access to energon's data sets: the samples of a split by index."""

import hashlib
import json
import logging
import shlex
import time
from bisect import bisect_right
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from examples.mimo.common.errors import one_line
from examples.mimo.nemotron_vlm.energon.errors import (
    BadConversation,
    BadShard,
    Excluded,
    Unreadable,
)
from examples.mimo.nemotron_vlm.energon.records import (
    KINDS,
    MediaFile,
    Record,
    decode_text,
    kind_of,
    read_record,
)
from examples.mimo.nemotron_vlm.energon.units import hash_of, stamp
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
from megatron.energon.fork_hook import after_in_child_fork_hook
from megatron.energon.metadataset.loader_interface import DatasetBlendMode

OPEN_SHARDS = 16
"""Shards of a data set that a process keeps open."""

PAUSES_S = (1, 2, 4, 8, 16, 32)
"""Seconds to wait before each new try to read a shard that the file system refuses."""

logger = logging.getLogger(__name__)

PARTS = {"train": ("train",), "test": ("val", "test")}
"""Energon's names for each split; the first part that the data has is taken."""

CONFIGURED = "configured by"
"""Subflavor that names the configuration files of a data set, if a blend names any."""


class EmptySplit(ValueError):
    """A split that the data does not have."""


class DataSet:
    """One data set of a split. Forked processes may read it: each opens its own files.

    Args:
        factory: the data set as energon loaded it.

    Raises:
        ValueError: the data set is of a kind that cannot be read.

    Attributes:
        weight: its weight or repetitions in a blend, else None.
        configuration: hash of energon's own files on which the samples depend, wherever they lie;
            of a file, hash of its records, and which of them are in the split.
        shards: energon's ``ShardInfo`` of each shard.
        ends: index of the first sample after each shard; the first element is 0.
        subset: range of the samples that a blend takes.
    """

    weight: float | int | None = None

    def __init__(self, factory: Any) -> None:
        if not isinstance(factory, BaseWebdatasetFactory):
            raise ValueError(f"a {type(factory).__name__} has no samples to read by index")
        self.path = Path(str(factory.path))
        if not issubclass(factory.__sample_type__, KINDS):
            kind = factory.__sample_type__.__name__
            raise ValueError(
                f"{self.path}: samples are {kind}; CaptioningSample and CrudeWebdataset are read"
            )
        self._factory = factory
        self._configured = factory.subflavors.get(CONFIGURED, "")
        patterns = INDEX_UUID_FILENAME, ".info.*", "*.yaml", "*.py"
        self.configuration = hash_of(self.path / MAIN_FOLDER_NAME, *patterns) + self._configured
        self._open()
        after_in_child_fork_hook(self._open)
        self.shards, self.ends = factory.shards, self._reader.shard_count_cumsum
        size = self.ends[-1]
        self.subset = range(*(factory.subset.compute_subset(size) if factory.subset else (size,)))

    def _open(self) -> None:
        self._reader = ShardInfosITarReader(
            self._factory.path,
            self._factory.shards,
            sample_filter=self._factory.sample_filter,
            itar_cache_size=OPEN_SHARDS,
        )

    @cached_property
    def _tar_files(self) -> list[str]:
        return get_info_shard_files(EPath(self.path))

    def state_of(self, number: int) -> str:
        """Return a hash of all that a shard's samples follow from: its file, index and settings.

        Other shards do not change it. A file that replaces the shard does: see `stamp`.

        Raises:
            OSError: the shard or its index is not there.
        """
        shard = self.shards[number]
        file = self.path / shard.name
        excluded = [k for k in self._factory.sample_excludes if k.startswith(f"{shard.name}/")]
        settings = hash_of(self.path / MAIN_FOLDER_NAME, "*.yaml", "*.py", without="split.yaml")
        depends = json.dumps([shard.name, shard.count, stamp(file), sorted(excluded), settings])
        index = file.with_name(f"{file.name}.idx").read_bytes()
        return self._configured + hashlib.sha256(depends.encode() + index).hexdigest()

    def raw(self, index: int, kinds: Collection[str] | None = None) -> dict[str, Any]:
        """Return a sample's files as bytes, with energon's ``__key__``.

        Args:
            kinds: kinds of media to read; others are empty. None reads all.

        Raises:
            BadShard: the shard is damaged or missing, or is not the one that was indexed.
            Unreadable: reads fail for another reason, even after the pauses of `PAUSES_S`.
            Excluded: ``split.yaml`` excludes the sample.
        """
        shard, place = self._locate(index)
        sample = f"{self.path / shard}, sample {place}"
        for pause in (*PAUSES_S, 0):
            try:
                return self._read(index, kinds)
            except Unreadable as error:
                if not pause:
                    waited = sum(PAUSES_S)
                    raise Unreadable(
                        f"{sample} cannot be read, also after {waited:g} s: {error}"
                    ) from error
                logger.warning("%s: %s; next try in %g s", sample, error, pause)
                time.sleep(pause)

    def _read(self, index: int, kinds: Collection[str] | None) -> dict[str, Any]:
        unread: dict[str, bytes] = {}

        def is_read(file: str) -> bool:
            if not self._factory.part_filter(file):
                return False
            if kinds is None or kind_of(file) in (None, *kinds):
                return True
            unread[file] = b""
            return False

        self._reader.part_filter = is_read
        try:
            raw = self._reader[index]
        except Exception as error:  # from tarfile, the file system or energon itself
            self._reader.close()
            self._open()
            raise (Unreadable if _may_pass(error) else BadShard)(one_line(error)) from error
        for shard in self._reader.itar_files_cache.values():
            shard.members.clear()  # a tarfile remembers all that it ever read
        if raw is None:
            raise Excluded(Excluded.kind)
        return raw | unread

    def record(self, raw: dict[str, Any], prompt: str) -> Record:
        """Return the conversation in what `raw` returned: decoded, with its fields mapped.

        Raises:
            BadConversation: a field is missing, or text is damaged.
        """
        sample = {name: MediaFile(name) if kind_of(name) else raw[name] for name in raw}
        try:
            return read_record(self._loaded(sample), prompt)
        except BadConversation:
            raise
        except Exception as error:  # from energon, or from the data set's own sample_loader
            raise BadConversation(one_line(error)) from error

    def _loaded(self, sample: dict[str, Any]) -> Any:
        return self._factory.load_sample(sample)

    def name(self, index: int) -> str:
        """Return ``shard/key`` of a sample from energon's index; the shard itself is not read.

        Where the index cannot be read either, the place in the shard stands for the key.
        """
        shard, place = self._locate(index)
        path = EPath(self.path / MAIN_FOLDER_NAME / INDEX_SQLITE_FILENAME)
        query = "SELECT sample_key FROM samples WHERE tar_file_id = ? AND sample_index = ?"
        try:
            with SqliteIndexReader(path) as file:
                (key,) = file.db.select_one(query, (self._tar_files.index(shard), place))
        except Exception:  # from sqlite, the file system or energon itself
            return f"{shard}/sample {place}"
        return f"{shard}/{key}"

    def _locate(self, index: int) -> tuple[str, int]:
        """Return the shard of a sample, and its index there."""
        shard = bisect_right(self.ends, index) - 1
        return self.shards[shard].name, index - self.ends[shard]


class Split(NamedTuple):
    """A split: its data sets, whether they share samples by weight, and energon's name for it."""

    by_weight: bool
    datasets: list[DataSet]
    part: str


def open_split(path: str | Path, split: str) -> Split:
    """Open a file of records, or shards or a blend that ``energon prepare`` has prepared.

    Args:
        path: a file or folder as `files.FileSet` takes it, the directory of a data set in shards,
            or the file of a blend (``metadataset.yaml``).
        split: 'train' or 'test'; the latter is energon's ``val``, or ``test`` if that is empty.

    Raises:
        EmptySplit: the data has no such split.
        ValueError: the data is missing, not prepared, or of a kind that cannot be read.
        OSError: the file system refuses to read its description.
    """
    path = Path(path).absolute()
    if not path.exists():
        raise ValueError(f"{path}: no such data set")
    from examples.mimo.nemotron_vlm.energon import files  # imports this module

    if files.are_files(path):
        records = files.FileSet(path, split)
        return Split(False, [records], records.part)
    if path.is_dir() and not check_dataset_info_present(EPath(path)):
        if not any(path.rglob("*.tar")):
            raise ValueError(f"{path}: no shards there (*.tar)")
        raise ValueError(f"{path}: not prepared; run: energon prepare {shlex.quote(str(path))}")
    single = WorkerConfig(rank=0, world_size=1, num_workers=0)
    try:
        loader = files.load_blend(path) if path.suffix == ".yaml" else load_dataset(path)
        for part in PARTS[split]:
            try:
                loaded = loader.get_datasets(
                    training=True, split_part=part, worker_config=single, decoder=decode_text
                )
            except (AssertionError, EmptyDatasetError, KeyError) as error:
                problem = error
                continue
            if any(entry.aux for entry in loaded.datasets):
                raise ValueError("auxiliary data sets are not read")
            datasets, by_weight = [], loaded.blend_mode is DatasetBlendMode.DATASET_WEIGHT
            for entry in loaded.datasets:
                is_file = isinstance(entry.dataset, files.FileSet)
                datasets.append(entry.dataset if is_file else DataSet(entry.dataset))
                datasets[-1].weight = entry.weight if by_weight else entry.repetitions
            return Split(by_weight, datasets, part)
    except Exception as error:  # energon asserts what the user got wrong
        line, kind = one_line(error), OSError if _may_pass(error) else ValueError
        raise kind(line if str(path) in line else f"{path}: {line}") from error
    why = one_line(problem)
    raise EmptySplit(f"{path}: has no samples for {' or '.join(PARTS[split])}: {why}")


def _may_pass(error: BaseException | None) -> bool:
    """Return whether the file system failed for another reason than a missing file."""
    while error and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None and not isinstance(error, FileNotFoundError)
