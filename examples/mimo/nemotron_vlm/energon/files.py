# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of a file of records, whose media lie in folders or in the records.

A record has the keys that the json of a shard's sample has. Under ``image``, ``videos`` and so on,
or in the items of its messages, it has paths of media, relative to the file or absolute, or the
media themselves. A clip may be a folder of frames. A sample's number follows from the record's
place in the file, so survey, order and resume work as with shards.
"""

import base64
import errno
import hashlib
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from examples.mimo.common.errors import one_line
from examples.mimo.nemotron_vlm.data import SUFFIXES
from examples.mimo.nemotron_vlm.energon.errors import BadConversation, Unreadable
from examples.mimo.nemotron_vlm.energon.record_files import open_file
from examples.mimo.nemotron_vlm.energon.records import (
    FRAME,
    ITEMS,
    SOURCES,
    decode_text,
    kind_of,
    numerically,
)
from examples.mimo.nemotron_vlm.energon.store import CONFIGURED, PARTS, DataSet, EmptySplit
from examples.mimo.nemotron_vlm.energon.units import stamp
from examples.mimo.nemotron_vlm.model.names import SOUND
from megatron.energon import CrudeSample
from megatron.energon.dataset_config import load_config
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.structs import DatasetSubset, ShardInfo
from megatron.energon.metadataset.dataset_loader import DatasetLoader
from megatron.energon.metadataset.loader_interface import (
    DatasetLoaderInterface,
    LoadedDataset,
    LoadedDatasetList,
)
from megatron.energon.metadataset.metadataset import Metadataset
from megatron.energon.metadataset.metadataset_v2 import DatasetReference, MetadatasetV2

HELD_OUT = 50
"""One record in this many is held out of a file that has no file of held-out records beside it."""

SMALL = 10_000
"""Most samples that training surveys by itself."""

OF_THE_PATH = {
    getattr(errno, name) for name in "ENOENT EISDIR ENOTDIR ENAMETOOLONG ELOOP EACCES EPERM".split()
}
"""Errors of a medium's path: the record is bad. Others are of the file system."""

CHUNK = 256
"""Samples that one process surveys at a time, as it does a shard."""

LEFT_BY_PROGRAMS = re.compile(r"\.|(?i:thumbs\.db|desktop\.ini)$")
"""Beginnings of names of files that programs leave in folders, which are no frames of a clip."""

LINE = 400
"""Most characters of a path in a message."""

UNNAMED = {"image": "png", "video": "mp4", "audio": "wav", "sound": "wav"}
"""Suffix in a sample of media that have no name; their bytes decide how they are read."""


class FileSet(DataSet):
    """The records of one split of a file; see `DataSet` for what it has.

    Args:
        path: a file, some of whose records are held out; or a folder with ``train.jsonl`` and
            perhaps ``val.jsonl`` or ``test.jsonl``.
        split: None takes all records of a file.

    Raises:
        EmptySplit: no record is in the split.
        ValueError: the file is no list of records; the message names it.
    """

    def __init__(self, path: Path, split: str | None) -> None:
        self._file, self.part, held_out = path, "", None
        if split is not None and path.is_file():
            self.part, held_out = PARTS[split][0], split == "test"
        elif split is not None:
            named = ((path / f"{part}{end}", part) for part in PARTS[split] for end in SUFFIXES)
            self._file, self.part = next((each for each in named if each[0].is_file()), (path, ""))
            if not self.part:
                parts = " or ".join(PARTS[split])
                raise EmptySplit(f"{path}: has no file {parts}{SUFFIXES[0]}")
        self.path = self._file.parent
        self._records = open_file(self._file)
        numbers = np.arange(len(self._records.places))
        if held_out is not None:
            numbers = numbers[(numbers % HELD_OUT == 0) == held_out]
        if not len(numbers):
            raise EmptySplit(f"{self._file}: has no samples for {self.part}")
        self._numbers = numbers
        self.configuration = f"{self._records.digest} {HELD_OUT} {held_out}"
        size = len(numbers)
        self.ends = [*range(0, size, CHUNK), size]
        counts = np.diff(self.ends).tolist()
        info = {"name": self._file.name, "path": EPath(self._file)}
        self.shards = [ShardInfo(**info, count=count) for count in counts]
        self.subset = range(size)

    def name(self, index: int) -> str:
        """Return ``file:line`` of a record, in Parquet ``file:row``.

        Where others share its line, its number follows, counted from 1.
        """
        number, places = int(self._numbers[index]), self._records.places
        near = places[max(0, number - 1) : number + 2]
        more = f" record {number + 1}" if (near == places[number]).sum() > 1 else ""
        return f"{self._file.name}:{places[number]}{more}"

    def state_of(self, number: int) -> str:
        """Return the hash of all that a run of records follows from: texts, names and media.

        Of media in files, it has the `stamp`.
        """
        digest = hashlib.sha256()
        for index in range(*self.ends[number : number + 2]):
            try:
                text, record = self._records.read(int(self._numbers[index]), True)
                digest.update(f"{self.name(index)} {len(text)}\n".encode() + text)
                for name, content in self._media(record, True):
                    content = (
                        content if isinstance(content, bytes) else repr(stamp(content)).encode()
                    )
                    digest.update(f"{name} {len(content)}\n".encode() + content)
            except Exception as error:  # such a sample is bad until its record or files change
                digest.update(f"{self.name(index)} {one_line(error)}\n".encode())
        return digest.hexdigest()

    def _read(self, index: int, kinds: Collection[str] | None) -> dict[str, Any]:
        bytes_too = kinds is None or len(kinds) > 0
        try:
            text, record = self._records.read(int(self._numbers[index]), bytes_too)
            whole: dict[str, Any] = {"__key__": self.name(index), "json": text}
            for name, content in self._media(record, bytes_too):
                if kinds is not None and kind_of(name) not in kinds:
                    content = b""
                whole[name] = content if isinstance(content, bytes) else content.read_bytes()
        except OSError as error:
            if error.errno in OF_THE_PATH:
                text = (error.strerror or "").lower()
                raise BadConversation(f"{_short(str(error.filename))}: {text}") from error
            raise Unreadable(one_line(error)) from error
        return whole

    def _loaded(self, sample: dict[str, Any]) -> CrudeSample:
        return CrudeSample(decode_text(sample))

    def _media(self, record: Any, bytes_too: bool) -> Iterator[tuple[str, Path | bytes]]:
        """Yield each file of a record's media: a name as in a shard, and its path or content.

        Args:
            bytes_too: whether media in the record have their bytes; these are empty otherwise.
        """
        for number, (kind, given) in enumerate(_named_media(record)):
            path, content = _path_and_bytes(kind, given, bytes_too)
            file = self.path / str(path)
            kind = "audio" if ITEMS[kind] == SOUND else kind  # a sample's sounds have one order
            name = f"{kind}{number}{file.suffix}"
            if content is not None:
                known = kind_of(name) is ITEMS[kind]
                yield (name if known else f"{kind}{number}.{UNNAMED[kind]}"), content
            elif kind == "video" and file.is_dir():
                frames = sorted(file.iterdir(), key=lambda frame: numerically(frame.name))
                frames = [frame for frame in frames if not LEFT_BY_PROGRAMS.match(frame.name)]
                for place, frame in enumerate(frames):
                    name = f"video{number}.{place}{frame.suffix}"
                    if not FRAME.fullmatch(name):
                        raise BadConversation(f"its video {path} has {frame.name}, no image")
                    yield name, frame
            elif kind_of(name) is ITEMS[kind]:
                yield name, file
            else:
                raise BadConversation(f"its {kind} {_short(path)} has the name of no {kind} file")


class FileReference:
    """A file of records in a blend; it replaces energon's reference to a data set."""

    def __init__(self, reference: DatasetReference, path: Path) -> None:
        self._reference, self._path = reference, path
        self.weight = getattr(reference, "weight", None)
        self.repetitions = getattr(reference, "repetitions", None)

    def post_initialize(self, mds_path: EPath | None = None) -> None:
        """Do nothing: a file needs no index."""

    def get_datasets(
        self, *, split_part: str, subset: DatasetSubset | None = None, **_: Any
    ) -> LoadedDatasetList:
        """Return the records of a part, without a weight; energon gives it."""
        part = self._reference.split_part or split_part
        records = FileSet(self._path, "train" if part == "train" else "test")
        if taken := self._reference._get_subset(subset):
            records.subset = range(*taken.compute_subset(len(records.subset)))
        return LoadedDatasetList(datasets=[LoadedDataset(dataset=records)])


def load_blend(path: Path) -> DatasetLoaderInterface:
    """Load the description of a blend, in which `FileReference` stands for files of records."""

    def replaced(reference: Any) -> Any:
        file = path.parent / str(getattr(reference, "path", ""))
        return FileReference(reference, file) if are_files(file) else reference

    file = EPath(path)
    blend = load_config(file, default_type=Metadataset, default_kwargs={"path": file})
    for name, entry in blend.splits.items() if isinstance(blend, MetadatasetV2) else ():
        for key in ("blend", "blend_epochized"):
            if references := getattr(entry, key, None):
                references[:] = map(replaced, references)
        blend.splits[name] = replaced(entry)
    blend.post_initialize()
    _name_configurations(blend)
    return blend


def _name_configurations(node: Any) -> None:
    """Note in a data set's subflavors which files a blend, also a nested one, configures it by."""
    if isinstance(node, DatasetLoader):
        if node.dataset_config or node.split_config:
            named = f"{node.dataset_config} {node.split_config}"
            node.subflavors = {**(node.subflavors or {}), CONFIGURED: named}
    elif isinstance(node, dict | list):
        for each in node.values() if isinstance(node, dict) else node:
            _name_configurations(each)
    else:
        for name in ("splits", "_splits", "datasets", "blend", "blend_epochized", "_dataset"):
            _name_configurations(getattr(node, name, []))


def are_files(path: Path) -> bool:
    """Return whether a path is a file of records, or a folder that has one to train on."""
    return path.suffix in SUFFIXES or any((path / f"train{each}").is_file() for each in SUFFIXES)


def _named_media(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield kind and path of each medium that a record names."""
    if not isinstance(record, dict):
        return
    for kind in ITEMS:
        for given in (record.get(kind), record.get(f"{kind}s")):
            for each in given if isinstance(given, list) else [given]:
                if each is not None:
                    yield kind, each
    messages = record.get("messages")
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        for item in content if isinstance(content, list) else []:
            kind = item.get("type") if isinstance(item, dict) else None
            for key in SOURCES[1:] if kind in tuple(ITEMS) else ():
                if item.get(key) is not None:
                    yield kind, item[key]


def _short(path: str) -> str:
    """Return a path as it stands in a line; what is too long for a path may be base64."""
    return path if len(path) <= LINE else f"{path[:LINE]}…"


def _path_and_bytes(kind: str, given: Any, bytes_too: bool) -> tuple[Any, bytes | None]:
    """Return the path and the content of a medium: a path, a data URI, or Hugging Face's struct."""
    path, content = given, None
    if isinstance(given, dict):
        path, content = given.get("path"), given.get("bytes") if bytes_too else b""
    elif isinstance(given, bytes):
        path, content = None, given
    elif isinstance(given, str) and given.startswith("data:"):
        path, content = None, given.partition(",")[2]
    if isinstance(content, str):
        try:
            content = base64.b64decode(content, validate=True)
        except ValueError as error:
            raise BadConversation(f"its {kind} is no base64: {error}") from error
    if not isinstance(content, bytes) and (content is not None or not isinstance(path, str)):
        raise BadConversation(f"its {kind} is {json.dumps(given)[:40]}, no path of a file")
    return path, content
