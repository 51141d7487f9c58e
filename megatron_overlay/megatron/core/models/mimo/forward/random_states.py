# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Random states, for dropout, of a module that shares its ranks with the language model.

The device's generator and the RNG tracker belong to the language model: they are seeded by its TP
ranks and stay in step on them. An encoder must not draw from them: its own TP ranks, which hold
different parts, could get the same dropout mask, and the language model's TP ranks would get out of
step where they encode different images.
"""

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
        """Do nothing: without Transformer Engine only Megatron's tracker holds states."""


class RandomStates:
    """The random states that one module draws from, seeded by its own TP, EP and expert-TP ranks.

    Construction is collective over the module's TP group, and waits for the device. The seed
    combines that of the device's generator on the group's first rank with the module's name.

    Args:
        groups: the module's process groups; the expert groups may be None.
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
        """Inside, draws come from these states; draws outside are not affected.

        Recomputation in the backward needs no such block, as it restores all states by itself.
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
    set_all_rng_states(tracked)  # else CUDA graphs would use the states added last
