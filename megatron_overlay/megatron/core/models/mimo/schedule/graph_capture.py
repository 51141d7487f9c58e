# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Control when Megatron's CUDA graphs of colocated modules are recorded and captured."""

from contextlib import AbstractContextManager
from functools import partial

import torch

from megatron.core.models.mimo.schedule.replaced import replaced
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.module import MegatronModule


def capture_deferred() -> AbstractContextManager[None]:
    """Inside, Megatron's schedule captures no graphs, as the encoders' backward comes after it."""
    return replaced(schedules, create_cudagraphs=lambda: None)


def capture() -> None:
    """Capture the recorded graphs, while other threads may allocate, such as one that pins batches.

    Megatron captures forwards so. A backward's capture would fail if one did, and the thread too.
    """
    with replaced(torch.cuda, graph=partial(torch.cuda.graph, capture_error_mode="thread_local")):
        schedules.create_cudagraphs()


def nothing_recorded() -> AbstractContextManager[None]:
    """Inside, modules run without graphs: for an evaluation, which would be recorded."""
    return replaced(CudaGraphManager, __call__=_run_module)


def _run_module(
    manager: CudaGraphManager, module: MegatronModule, args: tuple, kwargs: dict, cache_key=None
):
    if manager.func is not None:
        return manager.func(*args, **kwargs)
    return super(MegatronModule, module).__call__(*args, **kwargs)
