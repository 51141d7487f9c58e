# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hashes of a checkpoint's files, with the work divided over the ranks.

The manifest has upstream's format. In upstream, one rank hashes the files of all ranks after a
save, and every rank hashes all of them before a load. Here each rank reads only its share, about
S/n of a checkpoint of S bytes on n ranks. An asynchronous save is hashed in the background too, by
the process that writes it.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, Queue
from typing import Any

import torch.distributed as dist

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.first_rank import on_first_rank
from megatron.core.dist_checkpointing.validation import (
    _HASH_ALGORITHM,
    INTEGRITY_FNAME,
    _compute_file_hash,
)

TRIES = 5
"""Attempts, a second apart, to read files that other ranks have just written."""


def hash_in_writer(request: Any, checkpoint_dir: str) -> Any:
    """Return an asynchronous save that hashes files in its writer and ends with the manifest.

    Args:
        request: an ``AsyncRequest`` of either strategy. The first argument of its function is the
            rank, the last one the queue for the results.
    """
    hashed = None
    if request.async_fn is not None:
        hashed = request.async_fn_args[-1]
        write = partial(_write_and_hash, request.async_fn, checkpoint_dir)
        request = request._replace(async_fn=write)
    request.finalize_fns.append(partial(save_manifest, checkpoint_dir, hashed))
    return request


def _write_and_hash(write: Callable, checkpoint_dir: str, rank: int, *rest: Any, **named) -> None:
    """Write and hash, in the writer; the queue gets the hashes after the results of writing."""
    write(rank, *rest, **named)
    try:
        written = [name for name in _files(checkpoint_dir) if f"__{rank}_" in name]
        hashes = {name: _digest(checkpoint_dir, name) for name in written}
    except Exception:
        hashes = {}  # the ranks try again, and report the error
    rest[-1].put(hashes)


def save_manifest(checkpoint_dir: str, hashed: Queue | None = None) -> None:
    """Hash every file of a checkpoint and write the manifest; collective over the world.

    Args:
        hashed: queue that holds the hashes of files already hashed by this rank's writer.

    Raises:
        CheckpointingException: a rank cannot read a file of its share, or the first rank cannot
            write the manifest; raised on all ranks.
    """
    own: dict = {}
    with contextlib.suppress(Empty):  # then files are hashed below
        own = {} if hashed is None else hashed.get_nowait()
    files = _on_all_ranks(own)
    chosen = on_first_rank(_files)(checkpoint_dir)  # a rank may see a file later than others
    for _ in range(TRIES):
        unread = [name for name in chosen if not files.get(name)]
        files |= _digests(checkpoint_dir, unread)
        if all(files.values()):
            break
        time.sleep(1)
    else:
        unread = min(name for name, digest in files.items() if not digest)
        raise CheckpointingException(f"{checkpoint_dir} was not saved: cannot read {unread}")
    on_first_rank(_write_manifest)(checkpoint_dir, files)


def _write_manifest(checkpoint_dir: str, files: dict[str, str]) -> None:
    with open(os.path.join(checkpoint_dir, INTEGRITY_FNAME), "w") as file:
        ordered = dict(sorted(files.items()))
        json.dump({"algorithm": _HASH_ALGORITHM, "files": ordered}, file, indent=2)


def verify_manifest(checkpoint_dir: str) -> None:
    """Check the hash of every file that the manifest lists; collective over the world.

    Raises:
        CheckpointingException: there is no manifest, or files are missing or have changed; raised
            on all ranks.
    """
    manifest = on_first_rank(_read_manifest)(checkpoint_dir)
    found = _digests(checkpoint_dir, sorted(manifest))
    wrong = [
        f"{name} {'has changed' if found[name] else 'is missing or unreadable'}"
        for name in sorted(manifest)
        if found[name] != manifest[name]
    ]
    if wrong:
        raise CheckpointingException(f"the checkpoint is damaged: {', '.join(wrong)}")


def _read_manifest(checkpoint_dir: str) -> dict[str, str]:
    """Return the hashes by file name.

    Raises:
        CheckpointingException: the manifest cannot be read.
    """
    path = os.path.join(checkpoint_dir, INTEGRITY_FNAME)
    try:
        with open(path) as file:
            files = json.load(file)["files"]
        if not files or not all(isinstance(text, str) for pair in files.items() for text in pair):
            raise ValueError("it lists no files")
    except FileNotFoundError as error:
        raise CheckpointingException(
            f"the checkpoint has no {INTEGRITY_FNAME}: it was saved without --verify-integrity"
        ) from error
    except Exception as error:  # whatever is in a damaged file
        raise CheckpointingException(
            f"the checkpoint is damaged: {INTEGRITY_FNAME}: {error}"
        ) from error
    return files


def _digests(checkpoint_dir: str, names: list[str]) -> dict[str, str | None]:
    """Return hashes of all named files, on every rank; None for a file that cannot be read."""
    share = names[dist.get_rank() :: dist.get_world_size()]
    return _on_all_ranks({name: _digest(checkpoint_dir, name) for name in share})


def _digest(checkpoint_dir: str, name: str) -> str | None:
    try:
        return _compute_file_hash(os.path.join(checkpoint_dir, name))
    except Exception:  # the caller names the file
        return None


def _on_all_ranks(own: dict[str, str | None]) -> dict[str, str | None]:
    parts: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return {name: digest for part in parts for name, digest in part.items()}


def _files(checkpoint_dir: str) -> list[str]:
    found = (entry.name for entry in os.scandir(checkpoint_dir) if entry.is_file())
    return sorted(name for name in found if name != INTEGRITY_FNAME)
