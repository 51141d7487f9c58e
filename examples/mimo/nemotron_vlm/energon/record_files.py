# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Files of records: JSON, JSONL and Parquet. Each gives its records by number.

Only the places of the records are in memory. Parquet is read a row group at a time; a record's text
is read without its media's bytes.
"""

import hashlib
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from examples.mimo.common.errors import one_line
from examples.mimo.nemotron_vlm.energon.errors import BadShard, MissingPackage
from examples.mimo.nemotron_vlm.energon.records import decode_text
from examples.mimo.nemotron_vlm.energon.units import stamp

OPEN_GROUPS = 4
"""Row groups of a Parquet file that a process holds in memory."""

SPACE = re.compile(r"[ \t\r\n]*")
LINE = re.compile(rb"[^\n]*\S[^\n]*")
"""A line that is not blank."""


class JsonFile:
    """The records of a JSON or JSONL file.

    Attributes:
        places: the line of each record, int64 [records], counted from 1; in Parquet its row.
        digest: hash of the file; for Parquet, of its metadata alone.

    Raises:
        ValueError: the file is no list of records; the message names file and line.
    """

    def __init__(self, file: Path) -> None:
        data = file.read_bytes()
        self._file, self._spans = file, np.array([*_spans(file, data)], np.int64).reshape(-1, 2)
        newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
        self.places = np.searchsorted(newlines, self._spans[:, 0]) + 1
        self.digest = hashlib.sha256(data).hexdigest()

    def read(self, number: int, whole: bool) -> tuple[bytes, Any]:
        """Return a record's text, and the record.

        Args:
            whole: whether to read the bytes of media too, where they are apart from the text.

        Raises:
            BadConversation: the text is damaged.
            BadShard: the file is damaged.
        """
        start, end = self._spans[number].tolist()
        with open(self._file, "rb") as file:
            file.seek(start)
            text = file.read(end - start)
        return text, decode_text({"json": text})["json"]


class ParquetFile:
    """The rows of a Parquet file; see `JsonFile`."""

    def __init__(self, file: Path) -> None:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise MissingPackage("Parquet needs pyarrow: pip install '.[parquet]'") from error
        try:
            metadata = parquet.read_metadata(file)
        except ArrowException as error:
            raise ValueError(f"{file}: {one_line(error)}") from error
        with open(file, "rb") as data:
            data.seek(-metadata.serialized_size, 2)
            self.digest = hashlib.sha256(data.read()).hexdigest()
        groups = range(metadata.num_row_groups)
        self._ends = np.cumsum([0, *(metadata.row_group(group).num_rows for group in groups)])
        self.places = np.arange(metadata.num_rows) + 1
        leaves = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
        media = {leaf.removesuffix("path") + "bytes" for leaf in leaves if leaf.endswith(".path")}
        self._texts = [leaf for leaf in leaves if leaf not in media]

        @lru_cache(OPEN_GROUPS)
        def load(group: int, whole: bool) -> Any:
            columns = None if whole else self._texts
            # A process that is forked must not share the open file.
            with parquet.ParquetFile(file, metadata=metadata) as opened:
                try:
                    return opened.read_row_group(group, columns, use_threads=False)
                except (ArrowException, OSError) as error:
                    if getattr(error, "errno", None):
                        raise
                    raise BadShard(one_line(error)) from error

        self._load, self._has_media = load, len(self._texts) < len(leaves)

    def read(self, number: int, whole: bool) -> tuple[bytes, Any]:
        """See `JsonFile.read`."""
        group = int(np.searchsorted(self._ends, number, side="right")) - 1
        place = number - int(self._ends[group])
        text, record = (
            _without_nulls(self._load(group, each).slice(place, 1).to_pylist()[0])
            for each in (False, whole and self._has_media)
        )
        return json.dumps(text, default=_plain).encode(), record


def open_file(file: Path) -> JsonFile | ParquetFile:
    """Return the records of a file, which is parsed once for all splits unless it changes."""
    return _opened(file, stamp(file))


@lru_cache(maxsize=64)
def _opened(file: Path, _stamp: tuple[int, ...]) -> JsonFile | ParquetFile:
    return (ParquetFile if file.suffix == ".parquet" else JsonFile)(file)


def _without_nulls(value: Any) -> Any:
    """Return a value whose objects have no keys without a value.

    All objects of a column have the same keys in Parquet, as the arguments of all calls of tools.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _plain(value: Any) -> int | str:
    """Return what stands in a text for a value that JSON does not have."""
    return len(value) if isinstance(value, bytes) else str(value)


def _spans(file: Path, data: bytes) -> Iterable[tuple[int, int]]:
    """Yield start and end of each record, in bytes."""
    if file.suffix == ".jsonl":
        yield from (line.span() for line in LINE.finditer(data))
        return
    text = data.decode("latin-1")  # a character is a byte, and JSON's own signs are in ASCII
    decoder = json.JSONDecoder()
    first = len(BOM_UTF8) if data.startswith(BOM_UTF8) else 0
    place, sign = SPACE.match(text, first).end(), "["
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
