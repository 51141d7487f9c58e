# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron's CUDA graphs, for packed rows and for modules whose backward follows the schedule's."""

from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams


class BackwardGraph(torch.cuda.CUDAGraph):
    """A graph beside whose capture other threads may allocate, such as one that pins batches.

    Megatron captures forwards so. A backward's capture would fail if one did, and the thread too.
    """

    def capture_begin(self, *pool: tuple[int, int], **settings: object) -> None:
        """Begin to capture, in this mode."""
        super().capture_begin(*pool, **settings | {"capture_error_mode": "thread_local"})


captures_wait = False
"""Schedules capture no graphs: the encoders' backward comes after them, and is captured too."""

modules_alone = False
"""Modules run without graphs: for an evaluation, which would be recorded."""


def of_one_shape(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments whose tensors have the same shapes in each packed row.

    A graph has tensors of one shape, and rows differ in their samples. Mamba-2 needs the sample of
    each token alone, and experts need no boundaries; attention, which does, has no graphs. In a
    run of upstream's, with global groups, the arguments stay.
    """
    packed = arguments.get("packed_seq_params")
    if packed is None or parallel_state.is_initialized():
        return arguments
    names = "qkv_format", "seq_idx", "tokens_per_sample"
    of_tokens = PackedSeqParams(**{name: getattr(packed, name) for name in names})
    return arguments | {"packed_seq_params": of_tokens}
