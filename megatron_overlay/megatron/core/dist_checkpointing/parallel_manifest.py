# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hashes of a checkpoint's files, with the work divided over the ranks.

The manifest is upstream's; there one rank hashes everything that all ranks wrote, and at loading
every rank does. Here a rank reads its share: of a checkpoint of S bytes on n ranks about S/n.
"""

from __future__ import annotations

import json
import os
import time

import torch.distributed as dist

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import (
    _HASH_ALGORITHM,
    INTEGRITY_FNAME,
    _compute_file_hash,
)

TRIES = 5
"""A second apart, to read what other ranks have just written."""


def save_manifest(checkpoint_dir: str) -> None:
    """Hash every file there and write the manifest; collective over the world.

    Raises:
        CheckpointingException: on every rank alike, for a file that its rank cannot read.
    """
    names = sorted(
        entry.name
        for entry in os.scandir(checkpoint_dir)
        if entry.is_file() and entry.name != INTEGRITY_FNAME
    )
    chosen = [names]
    dist.broadcast_object_list(chosen)  # a rank may see a file later than others
    for _ in range(TRIES):
        digests = _digests(checkpoint_dir, chosen[0])
        unread = [name for name in chosen[0] if not digests[name]]
        if not unread:
            break
        time.sleep(1)
    else:
        raise CheckpointingException(f"{checkpoint_dir} was not saved: cannot read {unread[0]}")
    if dist.get_rank() == 0:
        files = {name: digests[name] for name in chosen[0]}
        path = os.path.join(checkpoint_dir, INTEGRITY_FNAME)
        with open(path, "w") as file:
            json.dump({"algorithm": _HASH_ALGORITHM, "files": files}, file, indent=2)


def verify_manifest(checkpoint_dir: str) -> None:
    """Check the hash of every file that the manifest lists; collective over the world.

    Raises:
        CheckpointingException: on every rank alike: without a manifest, or for files that are
            missing or have another content.
    """
    read = [_read_manifest(checkpoint_dir) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(read)
    (manifest,) = read
    if isinstance(manifest, str):
        raise CheckpointingException(manifest)
    found = _digests(checkpoint_dir, sorted(manifest))
    wrong = [
        f"{name} {'has changed' if found[name] else 'is missing or unreadable'}"
        for name in sorted(manifest)
        if found[name] != manifest[name]
    ]
    if wrong:
        raise CheckpointingException(f"the checkpoint is damaged: {', '.join(wrong)}")


def _read_manifest(checkpoint_dir: str) -> dict[str, str] | str:
    """The hash of each file, or what is wrong."""
    path = os.path.join(checkpoint_dir, INTEGRITY_FNAME)
    try:
        with open(path) as file:
            files = json.load(file)["files"]
        if not files or not all(isinstance(text, str) for pair in files.items() for text in pair):
            raise ValueError("it lists no files")
    except FileNotFoundError:
        return f"the checkpoint has no {INTEGRITY_FNAME}: it was saved without --verify-integrity"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"the checkpoint is damaged: {INTEGRITY_FNAME}: {error}"
    return files


def _digests(checkpoint_dir: str, names: list[str]) -> dict[str, str | None]:
    """Of all files, on every rank; None for one that cannot be read."""
    own = {}
    for name in names[dist.get_rank() :: dist.get_world_size()]:
        try:
            own[name] = _compute_file_hash(os.path.join(checkpoint_dir, name))
        except OSError:
            own[name] = None
    parts: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return {name: digest for part in parts for name, digest in part.items()}
