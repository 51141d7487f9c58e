# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hashes of a checkpoint's files, with the work divided over the ranks.

The manifest has upstream's format. Upstream hashes all files on one rank. Here each rank reads its
share, and the process that writes an asynchronous save hashes its own files in the background.
"""

import contextlib
import json
import os
from collections.abc import Callable
from functools import partial
from queue import Empty
from typing import Any

import torch.distributed as dist

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.first_rank import on_first_rank
from megatron.core.dist_checkpointing.managed_queue import ResultsQueue
from megatron.core.dist_checkpointing.validation import (
    _HASH_ALGORITHM,
    INTEGRITY_FNAME,
    _compute_file_hash,
)

Hashes = dict[str, str | None]
"""Hashes by file name; None for a file that cannot be read."""


def hash_in_writer(request: Any, checkpoint_dir: str) -> Any:
    """Return an ``AsyncRequest`` that hashes files in its writer and ends with the manifest."""
    hashed = None
    if request.async_fn is not None:
        hashed = request.async_fn_args[-1]  # the queue of the results
        write = partial(_write_and_hash, request.async_fn, checkpoint_dir)
        request = request._replace(async_fn=write)
    manifest = partial(save_manifest, checkpoint_dir, hashed)
    return request._replace(finalize_fns=[*request.finalize_fns, manifest])


def _write_and_hash(write: Callable, checkpoint_dir: str, rank: int, *rest: Any, **named) -> None:
    """Write and hash, in the writer; the queue gets the hashes after the results of writing."""
    write(rank, *rest, **named)
    hashes: Hashes = {}
    with contextlib.suppress(OSError):  # the ranks try again, and report the error
        written = [name for name in _files(checkpoint_dir) if f"__{rank}_" in name]
        hashes = {name: _hash(checkpoint_dir, name) for name in written}
    rest[-1].put(hashes)


def save_manifest(checkpoint_dir: str, hashed: ResultsQueue | None = None) -> None:
    """Hash every file of a checkpoint and write the manifest; collective over the world.

    Args:
        hashed: queue that has the hashes of the files that this rank's writer hashed.

    Raises:
        CheckpointingException: a rank cannot read a file of its share, or the first rank cannot
            write the manifest; raised on all ranks.
    """
    own: Hashes = {}
    with contextlib.suppress(Empty):
        own = {} if hashed is None else hashed.get_nowait()
    files = _on_all_ranks(own)
    chosen = on_first_rank(_files)(checkpoint_dir)  # a rank may see a file later than others
    files |= _hashes(checkpoint_dir, [name for name in chosen if not files.get(name)])
    if unread := sorted(name for name in files if not files[name]):
        raise CheckpointingException(f"{checkpoint_dir} was not saved: cannot read {unread[0]}")
    on_first_rank(_write_manifest)(checkpoint_dir, files)


def _write_manifest(checkpoint_dir: str, files: Hashes) -> None:
    with open(os.path.join(checkpoint_dir, INTEGRITY_FNAME), "w") as file:
        json.dump({"algorithm": _HASH_ALGORITHM, "files": files}, file, indent=2, sort_keys=True)


def verify_manifest(checkpoint_dir: str) -> None:
    """Check the hash of every file that the manifest lists; collective over the world.

    Raises:
        CheckpointingException: there is no manifest, or files are missing or have changed; raised
            on all ranks.
    """
    manifest = on_first_rank(_read_manifest)(checkpoint_dir)
    found = _hashes(checkpoint_dir, sorted(manifest))
    wrong = [
        f"{name} {'has changed' if found[name] else 'is missing or unreadable'}"
        for name in sorted(manifest)
        if found[name] != manifest[name]
    ]
    if wrong:
        raise CheckpointingException(f"the checkpoint is damaged: {', '.join(wrong)}")


def _read_manifest(checkpoint_dir: str) -> dict[str, str]:
    path = os.path.join(checkpoint_dir, INTEGRITY_FNAME)
    try:
        with open(path) as file:
            files = json.load(file)["files"]
        if not files or not all(isinstance(text, str) for text in files.values()):
            raise ValueError("it lists no files")
    except FileNotFoundError as error:
        raise CheckpointingException(
            f"the checkpoint has no {INTEGRITY_FNAME}: it was saved without --verify-integrity"
        ) from error
    except Exception as error:  # whatever is in a damaged file
        text = f"the checkpoint is damaged: {INTEGRITY_FNAME}: {error}"
        raise CheckpointingException(text) from error
    return files


def _hashes(checkpoint_dir: str, names: list[str]) -> Hashes:
    """Return hashes of all named files, on every rank."""
    share = names[dist.get_rank() :: dist.get_world_size()]
    return _on_all_ranks({name: _hash(checkpoint_dir, name) for name in share})


def _hash(checkpoint_dir: str, name: str) -> str | None:
    with contextlib.suppress(OSError):
        return _compute_file_hash(os.path.join(checkpoint_dir, name))


def _on_all_ranks(own: Hashes) -> Hashes:
    parts: list[Hashes] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return {name: digest for part in parts for name, digest in part.items()}


def _files(checkpoint_dir: str) -> list[str]:
    found = (entry.name for entry in os.scandir(checkpoint_dir) if entry.is_file())
    return sorted(name for name in found if name != INTEGRITY_FNAME)
