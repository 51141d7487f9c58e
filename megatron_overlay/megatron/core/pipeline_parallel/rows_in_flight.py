# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Number of rows that each source sent of a microbatch, kept until its gradient is split."""

from collections import deque
from collections.abc import Sequence

import torch


class RowsInFlight:
    """Queue of a pipeline stage's microbatches, whose forwards and backwards run in one order.

    Sources with different numbers of image tokens send different numbers of rows. The receiver
    concatenates them; the gradient has to be split where they were joined, not into equal parts.
    """

    def __init__(self) -> None:
        self._sizes: deque[list[int]] = deque()

    def note(self, shapes: Sequence[Sequence[int]], dim: int) -> None:
        """Add a received microbatch to the queue, unless no backward will follow."""
        if torch.is_grad_enabled():
            self._sizes.append([int(shape[dim]) for shape in shapes])

    def split(self, gradient: torch.Tensor, sources: int, dim: int) -> list[torch.Tensor]:
        """Split the gradient of the earliest microbatch by source, and drop it from the queue.

        A gradient without a microbatch in the queue is split into equal parts, as upstream does.
        """
        sizes = self._sizes.popleft() if self._sizes else gradient.shape[dim] // sources
        return [part.contiguous() for part in gradient.split(sizes, dim)]
