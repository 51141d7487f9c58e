# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hashes of a checkpoint's files, and reading that runs no code. Failed saves: test_saves.py."""

import os
import pickle
from queue import Queue

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import save

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.parallel_manifest import hash_in_writer, verify_manifest
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader
from megatron.core.dist_checkpointing.validation import verify_integrity_manifest


@pytest.fixture
def checkpoint(tmp_path):
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save({"weight": torch.ones(3)}, checkpoint_id=str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])  # the writer hashes only the first
def test_a_file_that_changes_after_it_was_hashed_is_named(checkpoint, name):
    request = hash_in_writer(AsyncRequest(lambda *_: None, (0, Queue()), []), str(checkpoint))
    request.async_fn(*request.async_fn_args)
    content = (checkpoint / name).read_bytes()
    if name == "__0_0.distcp":
        (checkpoint / name).write_bytes(content + b"!")
    request.finalize_fns[0]()
    (checkpoint / name).write_bytes(content + b"!")
    with pytest.raises(CheckpointingException, match=f"{name} has changed"):
        verify_manifest(str(checkpoint))
    (checkpoint / name).write_bytes(content)
    verify_integrity_manifest(str(checkpoint))  # upstream's own reads the manifest


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
