# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Loading processes that read ahead; if one dies, the run ends in a line with its samples."""

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils.signal_handling import _error_if_any_worker_fails

from examples.mimo.common.steps import Microbatch
from examples.mimo.nemotron_vlm.data.reading import Reader
from examples.mimo.nemotron_vlm.data.step_plan import Take

NAMED, NOTE = 3, 1000
"""Number of samples that the line names, and bytes of a process's note of them."""

NO_ROOM = "no loading process can pass samples on: {}; make room in /dev/shm, or --num-workers 0"
"""Line for an error of shared memory, which most often is full."""


def read_ahead(reader: Reader, takes: Iterator[Take], **options) -> Iterator[Microbatch | str]:
    """Yield what the reader makes of each take, in their order.

    If a loading process dies, a line with the reason takes the place of the next microbatch, and
    ends the iterator.

    Args:
        takes: read as they are handed out, ahead of what is yielded.
    """
    # PyTorch's handler would raise in the middle of a step. While a rank waits for a batch, PyTorch
    # looks at the processes every five seconds.
    handler = signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL
    try:
        notes = torch.zeros((options["num_workers"], NOTE), dtype=torch.uint8).share_memory_()
        batches = DataLoader(
            _Noting(reader, notes),
            sampler=takes,
            batch_size=None,
            collate_fn=lambda batch: batch,  # PyTorch's own would turn arrays into tensors
            generator=torch.Generator(),  # leaves the rank's own random state alone
            **options,
        )
        batches = iter(batches)
    except (OSError, RuntimeError) as error:
        yield NO_ROOM.format(error)
        return
    finally:
        signal.signal(signal.SIGCHLD, handler)
    try:
        yield from batches
    except (OSError, EOFError, RuntimeError) as error:
        if not (line := _death(error)):
            raise
        yield f"{line}; it was reading {_reading(notes, line)}"


@dataclass
class _Noting(Dataset):
    """Reads takes; each process notes its number and the names of the samples that it reads.

    notes: text, uint8 [loading processes, `NOTE`], which they share with the rank.
    """

    reader: Reader
    notes: Tensor

    def __getitem__(self, take: Take) -> Microbatch | str:
        if (process := get_worker_info()) is None:
            return self.reader[take]
        note, numbers = self.notes[process.id].numpy(), sorted(_samples(take))
        names = [self.reader.source.name(take.split, number) for number in numbers[:NAMED]]
        more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
        text = f"{os.getpid()} {', '.join(names)}{more}".encode()[:NOTE]
        note[: len(text)], note[len(text) :] = list(text), 0
        batch = self.reader[take]
        try:  # in the thread that passes it on, an error would lose it, and the rank wait for ever
            tree_map_only(Tensor, Tensor.share_memory_, batch)
        except (OSError, RuntimeError) as error:
            batch = NO_ROOM.format(error)
        note[:] = 0
        return batch


def _samples(take: Take) -> set[int]:
    """Return the numbers of all samples that a rank reads for a microbatch."""
    ranges = chain.from_iterable(share.ranges or () for share in take.shares.values())
    return set(chain.from_iterable(take.rows)) | {one.sample for one in ranges}


def _death(error: Exception) -> str | None:
    """Return PyTorch's line of a process's death, with the signal; None for another error."""
    # The rank, or its thread that pins batches, may meet the process's end before PyTorch does.
    if not str(error).startswith("DataLoader worker"):
        time.sleep(1)  # it may not be quite dead
        try:
            _error_if_any_worker_fails()
        except RuntimeError as death:
            error = death
    cause = error.__cause__ if isinstance(error.__cause__, RuntimeError) else error
    return str(cause).strip(" .") if str(error).startswith("DataLoader worker") else None


def _reading(notes: Tensor, line: str) -> str:
    """Return the names of the samples that the dead processes were reading."""
    written = (bytes(note.tolist()).rstrip(b"\0").decode(errors="replace") for note in notes)
    dead = set(re.findall(r"\d+", line))
    found = (text.partition(" ") for text in written)
    return ", ".join(islice((names for pid, _, names in found if pid in dead), NAMED)) or "nothing"
