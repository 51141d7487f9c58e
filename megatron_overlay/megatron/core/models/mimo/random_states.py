# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Random states of a module that shares its ranks with the language model, for dropout.

The device's generator and the RNG tracker are the language model's: seeded by its TP ranks, and in
step on them. An encoder that drew from them would drop the same on all its own TP ranks where they
hold different parts, and put the language model's TP ranks out of step where they encode different
images.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

try:
    from transformer_engine.pytorch.distributed import set_all_rng_states
except ImportError:

    def set_all_rng_states(_states: dict[str, object]) -> None:
        """Megatron's tracker alone knows the states."""


class RandomStates:
    """The states that one module draws from, by its own TP, EP and expert-TP ranks.

    Construction is collective over the module's TP group, and waits for the device. The seed is
    that of the device's generator on the group's first rank, with the module's name.

    Args:
        name: of the module.
        groups: its process groups; the expert ones may be None.
    """

    def __init__(self, name: str, groups: ProcessGroupCollection) -> None:
        seed = torch.tensor(torch.cuda.initial_seed() % 2**31, device=torch.cuda.current_device())
        dist.broadcast(seed, group=groups.tp, group_src=0)
        outer = _get()
        model_parallel_cuda_manual_seed(
            int(seed) + zlib.crc32(name.encode()),
            tp_rank=groups.tp.rank(),
            ep_rank=groups.ep.rank() if groups.ep else 0,
            etp_rank=groups.expt_tp.rank() if groups.expt_tp else 0,
        )
        self._states = _get()
        _set(outer)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Draws inside come from these states; those outside go on as if there were none.

        A recomputation in the backward needs no such block: it sets all states as they were.
        """
        outer = _get()
        _set(self._states)
        try:
            yield
        finally:
            self._states = _get()
            _set(outer)


def _get() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return torch.cuda.get_rng_state(), get_cuda_rng_tracker().get_states()


def _set(states: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> None:
    generator, tracked = states
    torch.cuda.set_rng_state(generator)
    get_cuda_rng_tracker().set_states(tracked)
    set_all_rng_states(tracked)  # those that CUDA graphs know; else the ones added last
