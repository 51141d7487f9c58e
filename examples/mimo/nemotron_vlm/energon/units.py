# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Files of what a survey found in one shard, and hashes of what a shard's samples follow from.

The survey of a data set is made of them. So a survey that is killed goes on with the next shard,
and after shards are added it reads the new ones alone.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

Unit = tuple[np.ndarray, np.ndarray, list[dict[str, Any]], str]
"""A unit is what a survey found in a shard: rows, int32 [7, samples]; media, `MEDIA` [media];
fields of the bad samples, with their index in the shard; and a hash of the samples' bytes."""


def save_unit(path: Path, unit: Unit) -> None:
    """Write a unit into a file."""
    rows, media, *notes = unit
    write(path, lambda file: np.savez(file, rows, media, json.dumps(notes)))


def load_unit(path: Path) -> Unit | None:
    """Read a unit; return None if the file is not there or damaged."""
    try:
        with np.load(path) as file:
            rows, media, notes = file.values()
    except (OSError, EOFError, ValueError, BadZipFile):
        return None
    return rows, media, *json.loads(notes.item())


def stamp(file: Path) -> tuple[int, int, int]:
    """Return a file's size, its time of modification, and its time of change, in ns.

    The last differs if another file of the same size and time of modification replaces it.
    """
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def hash_of(folder: Path, *patterns: str, without: str = "") -> str:
    """Return a hash of the files in a folder that fit one of some patterns."""
    files = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
    contents = (file.read_bytes() for file in files if file.name != without)
    return hashlib.sha256(b"\0".join(contents)).hexdigest()


def write(path: Path, write_into: Callable) -> None:
    """Write a file that is there as a whole or not at all."""
    own = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(own, "wb") as file:
        write_into(file)
    os.replace(own, path)
