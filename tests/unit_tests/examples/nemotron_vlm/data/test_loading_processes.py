# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A loading process that dies or finds no room, and a sample that is read too early."""

import os
import queue
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import dataloader

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data.loading_processes import read_ahead
from examples.mimo.nemotron_vlm.data.provider import Loading

OPTIONS = {"num_workers": 1, "prefetch_factor": 2, "multiprocessing_context": "fork"}


@dataclass
class Reader:
    """Reads a take by the number of its sample."""

    read: Callable[[int], object]
    source = SimpleNamespace(name=lambda split, number: f"{split} {number}")

    def __getitem__(self, take: SimpleNamespace) -> object:
        return self.read(take.rows[0][0])


def takes_of(samples: int) -> Iterator[SimpleNamespace]:
    return (SimpleNamespace(split="train", rows=[[n]], shares={}) for n in range(samples))


def test_a_process_that_dies_ends_the_reading_in_a_line_that_names_its_sample(monkeypatch):
    """The thread that pins batches meets the process's end first, and ends as well."""

    def deadly(number: int) -> int:
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    def with_a_thread(batches) -> object:
        asked = os.P_PID, batches._workers[0].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        while os.waitid(*asked) is None:  # is_alive() would take the news from PyTorch
            with suppress(queue.Empty):
                return batches._data_queue.get(timeout=0.1)
        raise RuntimeError("Pin memory thread exited unexpectedly")

    monkeypatch.setattr(dataloader._MultiProcessingDataLoaderIter, "_get_data", with_a_thread)
    *before, line = read_ahead(Reader(deadly), takes_of(12), **OPTIONS)
    assert before == list(range(len(before))) and len(before) <= 3
    assert re.fullmatch(r"DataLoader worker \(pid.*\) .*; it was reading train 3", line)


@pytest.mark.parametrize(("notes", "error"), [(False, RuntimeError), (True, OSError)])
def test_a_full_disk_under_shared_memory_is_a_line(notes, error, monkeypatch):
    """A rank would wait for ever for what the process could not pass on."""
    share = torch.Tensor.share_memory_

    def shared(tensor: torch.Tensor) -> torch.Tensor:
        """Refuse the notes of reads under way, or the second sample."""
        if notes if tensor.ndim else tensor == 1:
            raise error("unable to allocate: No space left on device (28)")
        return share(tensor)

    monkeypatch.setattr(torch.Tensor, "share_memory_", shared)
    tensors = Reader(lambda number: {"nested": [torch.tensor(number)]})
    read = read_ahead(tensors, takes_of(3), **OPTIONS)
    if not notes:
        assert next(read)["nested"][0] == 0
    assert "No space left on device (28); make room in /dev/shm, or --num-workers 0" in next(read)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_ends_its_own_step_alone(workers):
    """The GPU gets a microbatch more than the step has, which may be beyond the run's last."""

    def unreadable(number: int) -> dict | str:
        batch = {"number": torch.tensor(number), "step_work": None}
        return "no such shard" if number == 2 else batch

    ahead = {"prefetch_factor": 2, "multiprocessing_context": "fork"} if workers else {}
    loading = SimpleNamespace(
        args=SimpleNamespace(device="cuda", num_workers=workers),
        reader=Reader(unreadable),
        waited_s=0.0,
        _reading_ahead=lambda: ahead,
    )
    drawn = Loading._loaded(loading, takes_of(4))
    assert [int(next(drawn)[0]["number"]) for _ in range(2)] == [0, 1]
    with pytest.raises(UserError, match="--data: no such shard"):
        next(drawn)
