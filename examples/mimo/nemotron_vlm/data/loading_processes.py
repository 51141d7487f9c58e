# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Loading processes that read ahead; if one dies, the run ends in a line."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, get_worker_info

from examples.mimo.common.steps import Microbatch
from examples.mimo.nemotron_vlm.data.reading import Reader
from examples.mimo.nemotron_vlm.data.step_plan import Take

NO_ROOM = "no loading process can pass samples on: {}; make room in /dev/shm, or --num-workers 0"
"""Line for an error of shared memory, which most often is full."""


def read_ahead(reader: Reader, takes: Iterator[Take], **options) -> Iterator[Microbatch | str]:
    """Yield what the reader makes of each take, in their order.

    If a loading process dies, a line that says so takes the place of the next microbatch, and ends
    the iterator.

    Args:
        takes: read as they are handed out, ahead of what is yielded.
    """
    # PyTorch's handler would raise in the middle of a step. While a rank waits for a batch, PyTorch
    # looks at the processes every five seconds.
    handler = signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL
    loader = DataLoader(
        _Shared(reader),
        sampler=takes,
        batch_size=None,
        collate_fn=lambda batch: batch,  # PyTorch's own would turn arrays into tensors
        generator=torch.Generator(),  # leaves the rank's own random state alone
        **options,
    )
    try:
        batches = iter(loader)
    finally:
        signal.signal(signal.SIGCHLD, handler)
    try:
        yield from batches
    except (OSError, EOFError, RuntimeError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[-1]
        if isinstance(error, RuntimeError) and not line.startswith("DataLoader worker"):
            raise
        yield f"a loading process has died: {line}"


@dataclass
class _Shared(Dataset):
    """Reads takes; loading processes put the tensors into shared memory."""

    reader: Reader

    def __getitem__(self, take: Take) -> Microbatch | str:
        batch = self.reader[take]
        if get_worker_info() is None:
            return batch
        try:  # in the thread that passes it on, an error would lose it, and the rank wait for ever
            return tree_map_only(Tensor, Tensor.share_memory_, batch)
        except (OSError, RuntimeError) as error:
            return NO_ROOM.format(error)
