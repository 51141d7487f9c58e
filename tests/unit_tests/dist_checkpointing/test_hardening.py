# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hashes of a checkpoint's files, writes of the first rank, and loading that runs no code."""

import os
import pickle
from queue import Queue

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, save
from torch.distributed.checkpoint.metadata import Metadata

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.first_rank import on_first_rank, whole_file
from megatron.core.dist_checkpointing.parallel_manifest import (
    hash_in_writer,
    save_manifest,
    verify_manifest,
)
from megatron.core.dist_checkpointing.safe_loading import no_code_from_checkpoints
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.validation import verify_integrity_manifest


@pytest.fixture
def checkpoint(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save({"weight": torch.ones(3)}, checkpoint_id=str(tmp_path))
    yield tmp_path
    dist.destroy_process_group()


def written(folder: str) -> AsyncRequest:
    """A save that has been written and hashed in `folder`."""
    request = hash_in_writer(AsyncRequest(lambda *_: None, (0, Queue()), []), folder)
    request.async_fn(*request.async_fn_args)
    return request


def test_a_file_that_changes_after_its_writer_hashed_it_is_named(checkpoint):
    (file,) = checkpoint.glob("*.distcp")
    content, request = file.read_bytes(), written(str(checkpoint))
    file.write_bytes(content + b"!")
    request.finalize_fns[0]()
    with pytest.raises(CheckpointingException, match=f"{file.name} has changed"):
        verify_manifest(str(checkpoint))
    file.write_bytes(content)
    verify_integrity_manifest(str(checkpoint))  # upstream's own reads the manifest


def test_ranks_hash_what_a_writer_could_not_read(checkpoint):
    save_manifest(str(checkpoint), written("/nowhere").async_fn_args[-1])
    verify_manifest(str(checkpoint))
    (checkpoint / ".metadata").unlink()
    with pytest.raises(CheckpointingException, match=".metadata is missing"):
        verify_manifest(str(checkpoint))


def test_what_the_first_rank_cannot_write_is_raised_and_a_file_keeps_what_it_had(checkpoint):
    tracker = checkpoint / "tracker"
    tracker.write_text("2")

    @on_first_rank
    def write():
        with whole_file(str(tracker), open) as file:
            file.write("4")
            raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointingException, match="No space left on device"):
        write()
    assert tracker.read_text() == "2"


class _Code:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_metadata_runs_no_code(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Metadata({})))
    with no_code_from_checkpoints():
        assert isinstance(FileSystemReader(str(checkpoint)).read_metadata(), Metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_Code()))
    with no_code_from_checkpoints(), pytest.raises(CheckpointingException, match="mkdir"):
        FileSystemReader(str(checkpoint)).read_metadata()
    assert not os.path.exists("ran")
