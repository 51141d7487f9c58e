# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hashes of a checkpoint's files, and loading that runs no code, on one rank."""

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
    if dist.is_initialized():
        pytest.skip("needs a process without groups")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save({"weight": torch.ones(3)}, checkpoint_id=str(tmp_path))
    yield tmp_path
    dist.destroy_process_group()


def test_the_manifest_is_the_one_that_a_single_rank_makes_and_names_a_changed_file(checkpoint):
    save_manifest(str(checkpoint))
    verify_manifest(str(checkpoint))
    verify_integrity_manifest(str(checkpoint))
    (file,) = checkpoint.glob("*.distcp")
    file.write_bytes(file.read_bytes() + b"!")
    with pytest.raises(CheckpointingException, match=f"{file.name} has changed"):
        verify_manifest(str(checkpoint))


def test_the_hashes_of_an_asynchronous_save_are_its_writers(checkpoint):
    (file,) = checkpoint.glob("*.distcp")
    written, results = file.read_bytes(), Queue()

    def write(rank, content, results):
        file.write_bytes(content)
        results.put("written")

    request = hash_in_writer(AsyncRequest(write, (0, written, results), []), str(checkpoint))
    request.async_fn(*request.async_fn_args)
    assert results.get() == "written"
    file.write_bytes(written + b"!")
    (finalize,) = request.finalize_fns
    finalize()
    with pytest.raises(CheckpointingException, match=f"{file.name} has changed"):
        verify_manifest(str(checkpoint))
    file.write_bytes(written)
    verify_integrity_manifest(str(checkpoint))

    results = Queue()  # what a writer could not hash, the ranks do
    write = hash_in_writer(AsyncRequest(lambda *_: None, (0, None, results), []), "/nowhere")
    write.async_fn(*write.async_fn_args)
    save_manifest(str(checkpoint), results)
    verify_integrity_manifest(str(checkpoint))


def test_what_the_first_rank_cannot_write_is_raised_and_a_file_keeps_what_it_had(checkpoint):
    tracker = checkpoint / "tracker"

    @on_first_rank
    def write(text, is_full):
        with whole_file(str(tracker), open) as file:
            file.write(text)
            if is_full:
                raise OSError(28, "No space left on device")
        return tracker.read_text()

    assert write("2", False) == "2"
    with pytest.raises(CheckpointingException, match="No space left on device"):
        write("4", True)
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
