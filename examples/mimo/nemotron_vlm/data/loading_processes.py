# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Loading processes that read ahead, and are replaced when one dies."""

import logging
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils.signal_handling import _error_if_any_worker_fails

from examples.mimo.common.steps import Microbatch
from examples.mimo.nemotron_vlm.data.reading import Reader
from examples.mimo.nemotron_vlm.data.step_plan import Take

PAUSES_S = (1, 2, 4, 8)
"""Seconds to wait after each death in a row, before new processes start."""

NAMED = 3
"""Number of samples that the report of a death names."""

NO_ROOM = "no loading process can pass samples on: {}; make room in /dev/shm, or --num-workers 0"
"""Line for an error of shared memory, which most often is full."""

Numbered = tuple[int, Take]
"""A take, and its place in the order."""

logger = logging.getLogger(__name__)


def read_ahead(reader: Reader, takes: Iterator[Take], **options) -> Iterator[Microbatch | str]:
    """Yield what the reader makes of each take, in their order.

    If a loading process dies, new ones read all that is still due. If they die, too, after each of
    the pauses of `PAUSES_S`, the reason is yielded in the place of a microbatch.

    Args:
        takes: read as they are handed out, ahead of what is yielded.
    """
    orders = _Orders(enumerate(takes))
    due, deaths = orders.due, 0
    try:
        noting = _Noting(reader, torch.full((options["num_workers"], 2), -1).share_memory_())
        batches = _start(noting, orders, **options)
    except (OSError, RuntimeError) as error:
        yield NO_ROOM.format(error)
        return
    while True:
        try:
            batch = _next(batches, orders)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            line = f"{_reason(error)}; it was reading {noting.names(error, due)}"
        else:
            deaths = 0
            del due[min(due)]
            yield batch
            continue
        if deaths == len(PAUSES_S):
            yield f"{line}, the {deaths + 1}th in a row"
            return
        logger.warning("%s; new loading processes in %g s", line, PAUSES_S[deaths])
        time.sleep(PAUSES_S[deaths])
        again = chain(tuple(due.items()), orders)
        batches, deaths = _start(noting, again, **options), deaths + 1


@dataclass
class _Orders(Iterator[Numbered]):
    """Hands takes out to loading processes.

    due: takes handed out, whose microbatch is not there yet.
    is_making: a take is being made. An error raised meanwhile would end the takes for good.
    """

    takes: Iterator[Numbered]
    due: dict[int, Take] = field(default_factory=dict)
    is_making: bool = False

    def __next__(self) -> Numbered:
        self.is_making = True
        try:
            number, self.due[number] = next(self.takes)
        finally:
            self.is_making = False
        return number, self.due[number]


@dataclass
class _Noting(Dataset):
    """Reads takes, and notes the process and the take of each read under way.

    notes: int64 [loading processes, 2], which they share with the rank.
    """

    reader: Reader
    notes: Tensor

    def __getitem__(self, numbered: Numbered) -> Microbatch | str:
        if (process := get_worker_info()) is None:
            return self.reader[numbered[1]]
        note = self.notes[process.id]
        note[0], note[1] = os.getpid(), numbered[0]
        batch = self.reader[numbered[1]]
        try:  # in the thread that passes it on, an error would lose it, and the rank wait for ever
            tree_map_only(Tensor, Tensor.share_memory_, batch)
        except (OSError, RuntimeError) as error:
            batch = NO_ROOM.format(error)
        note[1] = -1
        return batch

    def names(self, error: RuntimeError, due: dict[int, Take]) -> str:
        """Name the first samples that a process was reading when it died."""
        dead = {int(pid) for pid in re.findall(r"\d+", _reason(error))}
        reading = [number for pid, number in self.notes.tolist() if pid in dead]
        takes = [due[number] for number in reading if number in due]
        names = [
            self.reader.source.name(take.split, number)
            for take in takes
            for number in sorted(_samples(take))
        ]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return (", ".join(names[:NAMED]) or "nothing") + more


def _samples(take: Take) -> set[int]:
    """Return the numbers of all samples that a rank reads for a microbatch."""
    ranges = chain.from_iterable(share.ranges or () for share in take.shares.values())
    return set(chain.from_iterable(take.rows)) | {one.sample for one in ranges}


def _reason(error: RuntimeError) -> str:
    """Return PyTorch's line of a death; its cause is the same, with the signal."""
    cause = error.__cause__ if isinstance(error.__cause__, RuntimeError) else error
    return str(cause).strip(" .")


def _start(data: _Noting, takes: Iterable[Numbered], **options) -> Iterator[Microbatch | str]:
    loader = DataLoader(
        data,
        sampler=takes,
        batch_size=None,
        collate_fn=lambda batch: batch,  # PyTorch's own would turn arrays into tensors
        generator=torch.Generator(),  # leaves the rank's own random state alone
        **options,
    )
    handler = signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL
    batches = iter(loader)
    signal.signal(signal.SIGCHLD, handler)  # PyTorch sets its own, see `_next`
    return batches


def _next(batches: Iterator[Microbatch | str], orders: _Orders) -> Microbatch | str:
    """Return what loading processes have read.

    PyTorch's handler of SIGCHLD raises when one dies. It is set in here alone: elsewhere it would
    end a step, for data that may still come. A death while a take is made is noticed by PyTorch's
    own look at its processes, every five seconds.

    Raises:
        RuntimeError: one has died.
    """

    def notice(*_) -> None:
        if not orders.is_making:
            _error_if_any_worker_fails()

    handler = signal.signal(signal.SIGCHLD, notice)
    try:
        _error_if_any_worker_fails()
        return next(batches)
    except (OSError, EOFError):  # a process died between the note of its batch and the batch
        time.sleep(1)  # it may not be quite dead, and then PyTorch's handler raises
        _error_if_any_worker_fails()
        raise
    finally:  # None stands for one that Python did not set
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)
