# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of a JSON or JSONL file, whose media lie in folders.

A record has the keys that the json of a shard's sample has. It names its media, relative to the
file or absolute, under ``image``, ``videos`` and so on, or in the items of its messages. A clip may
be a folder of frames. A sample's number follows from the record's place in the file, so survey,
order and resume work as with shards.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.mimo.nemotron_vlm.data import SUFFIXES
from examples.mimo.nemotron_vlm.energon.errors import BadConversation, Unreadable, one_line
from examples.mimo.nemotron_vlm.energon.records import (
    ITEMS,
    SOURCES,
    decode_text,
    kind_of,
    numerically,
)
from examples.mimo.nemotron_vlm.energon.store import PARTS, DataSet, EmptySplit
from megatron.energon import CrudeSample

HELD_OUT = 50
"""One record in this many is held out of a file that has no file of held-out records beside it."""

SMALL = 10_000
"""Most samples that training surveys by itself."""

CHUNK = 256
"""Samples that one process surveys at a time, as it does a shard."""

SPACE = re.compile(r"[ \t\r\n]*")
LINE = re.compile(rb"[^\n]*\S[^\n]*")
"""A line that is not blank."""


class Chunk(NamedTuple):
    """A range of records, used as energon's ``ShardInfo``."""

    name: str
    count: int


class FileSet(DataSet):
    """The records of one split of a JSON or JSONL file; see `DataSet` for what it has.

    Only the places of the records are held in memory.

    Args:
        place: the path that ``--data`` names, and the split; also for processes that are spawned.

    Raises:
        EmptySplit: no record is in the split.
        ValueError: the file is no list of records; the message names file and line.
    """

    weight = None
    configuration = ""
    """Hash of the file's records, and which of them are in the split."""

    def __init__(self, place: tuple[Path, str | None]) -> None:
        self._place, self._given_up = place, set()
        self._file, self.part, held_out = file_of(*place)
        self.path = self._file.parent
        data = self._file.read_bytes()
        spans = np.array(list(_spans(self._file, data)), np.int64).reshape(-1, 2)
        if held_out is not None:
            spans = spans[(np.arange(len(spans)) % HELD_OUT == 0) == held_out]
        self._spans = spans
        if not len(spans):
            raise EmptySplit(f"{self._file}: has no samples for {self.part}")
        newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
        self._lines = np.searchsorted(newlines, spans[:, 0]) + 1
        digest = hashlib.sha256(data).hexdigest()
        self.configuration = f"{digest} {HELD_OUT} {held_out}"
        size = len(spans)
        self.ends = [*range(0, size, CHUNK), size]
        counts = np.diff(self.ends).tolist()
        self.shards = [Chunk(self._file.name, count) for count in counts]
        self.subset = range(size)

    def __reduce__(self) -> tuple[Any, ...]:
        return FileSet, (self._place,)

    def name(self, index: int) -> str:
        """Return ``file:line`` of a record."""
        return f"{self._file.name}:{self._lines[index]}"

    def _read(self, index: int, kinds: Collection[str] | None) -> dict[str, Any]:
        start, end = self._spans[index].tolist()
        try:
            with open(self._file, "rb") as file:
                file.seek(start)
                text = file.read(end - start)
            whole: dict[str, Any] = {"__key__": self.name(index), "json": text}
            for name, path in self._media(decode_text(whole)["json"]):
                read = kinds is None or kind_of(name) in kinds
                whole[name] = path.read_bytes() if read else b""
        except (FileNotFoundError, IsADirectoryError) as error:
            raise BadConversation(f"{error.filename}: no such file") from error
        except OSError as error:
            raise Unreadable(one_line(error)) from error
        return whole

    def _loaded(self, sample: dict[str, Any]) -> CrudeSample:
        return CrudeSample(decode_text(sample))

    def _media(self, record: Any) -> Iterator[tuple[str, Path]]:
        """Yield a name as in a shard, and the path, of each file of a record's media."""
        for number, (kind, given) in enumerate(_named_media(record)):
            if not isinstance(given, str):
                raise BadConversation(f"its {kind} is {json.dumps(given)[:40]}, no path of a file")
            path = self.path / given
            if kind == "video" and path.is_dir():
                frames = sorted(path.iterdir(), key=lambda frame: numerically(frame.name))
                for place, frame in enumerate(frames):
                    yield f"video{number}.{place}{frame.suffix}", frame
            elif kind_of(f"{kind}{number}{path.suffix}") is ITEMS[kind]:
                yield f"{kind}{number}{path.suffix}", path
            else:
                raise BadConversation(f"its {kind} {given} has the name of no {kind} file")


def file_of(path: Path, split: str | None) -> tuple[Path, str, bool | None]:
    """Return the file of a split, the split's name, and which of the file's records are in it.

    Args:
        path: a file; or a folder with ``train.jsonl`` and perhaps ``val.jsonl`` or ``test.jsonl``.
        split: None takes all records of a file.

    Returns:
        The last part tells whether the records are held out or all others; None: all records.
    """
    if split is None:
        return path, "", None
    if path.is_file():
        return path, PARTS[split][0], split == "test"
    for part in PARTS[split]:
        for suffix in SUFFIXES:
            if (file := path / f"{part}{suffix}").is_file():
                return file, part, None
    raise EmptySplit(f"{path}: has no file {' or '.join(PARTS[split])}{SUFFIXES[0]}")


def are_files(path: Path) -> bool:
    """Return whether a path is a file of records, or a folder that has one to train on."""
    return path.suffix in SUFFIXES or any((path / f"train{each}").is_file() for each in SUFFIXES)


def _spans(file: Path, data: bytes) -> Iterable[tuple[int, int]]:
    """Yield start and end of each record, in bytes."""
    if file.suffix == ".jsonl":
        yield from (line.span() for line in LINE.finditer(data))
        return
    text = data.decode("latin-1")  # a character is a byte, and JSON's own signs are in ASCII
    decoder = json.JSONDecoder()
    place, sign = SPACE.match(text).end(), "["
    try:
        while text[place : place + 1] == sign:
            place = SPACE.match(text, place + 1).end()
            if sign == "[" and text[place : place + 1] == "]":
                break
            _, end = decoder.raw_decode(text, place)
            yield place, end
            place, sign = SPACE.match(text, end).end(), ","
        if text[place : place + 1] != "]" or text[place + 1 :].strip():
            raise json.JSONDecodeError("no list of records", text, place)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}: {error.msg}") from error


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
