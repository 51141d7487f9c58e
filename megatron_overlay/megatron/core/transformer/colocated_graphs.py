# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's CUDA graphs, for modules whose backward comes after the schedule's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class BackwardGraph(torch.cuda.CUDAGraph):
    """A graph beside whose capture other threads may allocate, such as one that pins batches.

    Megatron captures forwards so. A backward's capture would fail if one did, and the thread too.
    """

    def capture_begin(self, *pool: tuple[int, int], **settings: object) -> None:
        """Begin to capture, in this mode."""
        super().capture_begin(*pool, **settings | {"capture_error_mode": "thread_local"})


class Switch:
    """Something that is on inside a block."""

    def __init__(self) -> None:
        self.is_on = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Switch on, once."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


captures_wait = Switch()
"""Schedules capture no graphs: the encoders' backward comes after them, and is captured too."""

modules_alone = Switch()
"""Modules run without graphs: for an evaluation, which would be recorded."""
