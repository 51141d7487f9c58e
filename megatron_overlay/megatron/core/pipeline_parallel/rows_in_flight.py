# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""How many rows each source sent of a microbatch, until their gradients have gone back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch


class RowsInFlight:
    """A queue over the microbatches of a pipeline stage, which go forward and back in one order.

    Sources with different numbers of image tokens send different numbers of rows. The receiver
    joins them to one tensor; its gradient has to be cut where they were joined, not into equal
    parts.
    """

    def __init__(self) -> None:
        self._sizes: deque[list[int]] = deque()

    def note(self, shapes: Sequence[Sequence[int]], dim: int) -> None:
        """Remember a microbatch that was received; nothing where no backward will follow.

        Args:
            shapes: of the tensors, one a source.
            dim: along which they are joined.
        """
        if torch.is_grad_enabled():
            self._sizes.append([int(shape[dim]) for shape in shapes])

    def split(self, gradient: torch.Tensor, sources: int, dim: int) -> list[torch.Tensor]:
        """Cut the gradient of the earliest microbatch for its sources, and forget it.

        A gradient without a microbatch in flight is cut into equal parts, as upstream does.
        """
        sizes = self._sizes.popleft() if self._sizes else gradient.shape[dim] // sources
        return [part.contiguous() for part in gradient.split(sizes, dim)]
