# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hashes of a checkpoint's files, and reading that runs no code. Failed saves: test_saves.py."""

import os
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import save

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.parallel_manifest import save_manifest, verify_manifest
from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader
from megatron.core.dist_checkpointing.validation import verify_integrity_manifest


@pytest.fixture
def checkpoint(tmp_path):
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save({"weight": torch.ones(3)}, checkpoint_id=str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_file_that_changes_after_it_was_hashed_is_named(checkpoint, name):
    save_manifest(str(checkpoint))
    verify_integrity_manifest(str(checkpoint))  # upstream's own reads the manifest
    (checkpoint / name).write_bytes((checkpoint / name).read_bytes() + b"!")
    with pytest.raises(CheckpointingException, match=f"{name} has changed"):
        verify_manifest(str(checkpoint))
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointingException, match=f"{name} is missing"):
        verify_manifest(str(checkpoint))


class _Code:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("is_cached", [False, True])
def test_metadata_runs_no_code(checkpoint, monkeypatch, is_cached):
    monkeypatch.chdir(checkpoint)
    reader = _get_filesystem_reader(str(checkpoint), is_cached, "mcore")
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_Code()))
    with pytest.raises(CheckpointingException, match="mkdir"):
        reader.read_metadata()
    assert not os.path.exists("ran")
