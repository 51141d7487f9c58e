# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hashes of a checkpoint's files, with the work divided over the ranks.

The manifest has upstream's format. Upstream hashes all files on one rank, one after the other; here
each rank reads its share, several files at once.
"""

import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch.distributed as dist

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.first_rank import on_first_rank
from megatron.core.dist_checkpointing.validation import (
    _HASH_ALGORITHM,
    INTEGRITY_FNAME,
    _compute_file_hash,
)

Hashes = dict[str, str | None]
"""Hashes by file name; None for a file that cannot be read."""

AT_ONCE = 4
"""Files that a process hashes at the same time: a core hashes 1 GB/s, and storage reads faster."""


def save_manifest(checkpoint_dir: str) -> None:
    """Hash every file of a checkpoint and write the manifest; collective over the world.

    Raises:
        CheckpointingException: a rank cannot read a file of its share, or the first rank cannot
            write the manifest; raised on all ranks.
    """
    names = on_first_rank(_files)(checkpoint_dir)  # a rank may see a file later than others
    files = _hashes(checkpoint_dir, names)
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
    """Return hashes of all named files, on every rank; also where there are no ranks."""
    if not dist.is_initialized():
        return _own_hashes(checkpoint_dir, names)
    share = names[dist.get_rank() :: dist.get_world_size()]
    parts: list[Hashes] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, _own_hashes(checkpoint_dir, share))
    return {name: digest for part in parts for name, digest in part.items()}


def _own_hashes(checkpoint_dir: str, names: list[str]) -> Hashes:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(partial(_hash, checkpoint_dir), names), strict=True))


def _hash(checkpoint_dir: str, name: str) -> str | None:
    with contextlib.suppress(OSError):
        return _compute_file_hash(os.path.join(checkpoint_dir, name))


def _files(checkpoint_dir: str) -> list[str]:
    found = (entry.name for entry in os.scandir(checkpoint_dir) if entry.is_file())
    return sorted(name for name in found if name != INTEGRITY_FNAME)
