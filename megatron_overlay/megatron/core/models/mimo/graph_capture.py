# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""In which steps of colocated modules Megatron's CUDA graphs are recorded, and when captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.module import MegatronModule


@contextlib.contextmanager
def capture_deferred() -> Iterator[None]:
    """Have Megatron's schedule capture no graphs: the encoders' backward comes after it."""
    capture, schedules.create_cudagraphs = schedules.create_cudagraphs, lambda: None
    try:
        yield
    finally:
        schedules.create_cudagraphs = capture


@contextlib.contextmanager
def nothing_recorded() -> Iterator[None]:
    """Run modules as if they had no graphs: a step in another order than those to come."""
    call, CudaGraphManager.__call__ = CudaGraphManager.__call__, _run_module
    try:
        yield
    finally:
        CudaGraphManager.__call__ = call


def _run_module(
    manager: CudaGraphManager, module: MegatronModule, args: tuple, kwargs: dict, cache_key=None
):
    if manager.func is not None:
        return manager.func(*args, **kwargs)
    return super(MegatronModule, module).__call__(*args, **kwargs)


def capture_each_use(module: torch.nn.Module) -> None:
    """Give each forward of a step graphs of its own, before any is recorded.

    Graphs share memory that is free where they were captured. One that is used again is used at
    other times, when others may use that memory.
    """
    for child in module.modules():
        if isinstance(child, CudaGraphManager):
            child.reuse_cudagraphs = False
