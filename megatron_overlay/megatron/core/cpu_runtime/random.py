# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The random state of the "device": PyTorch's CPU generator, which ops on CPU tensors draw from.

Megatron's `CudaRNGStatesTracker` forks the CUDA state and then draws, so its forks must set the
generator that CPU ops use: here the host and the device share one generator. This module handles
two consequences:
- A data loader draws from the host's generator, often on only one rank of a tensor-parallel group.
  That would advance the device's state, and the ranks' dropout masks would diverge, so data loading
  gets a stream of its own.
- The tracker warns whenever the CPU state changes inside a fork, which here it always does.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence

import torch
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

from megatron.core.cpu_runtime.replacement import Replacement

_TRACKER_LOGGER = "megatron.core.tensor_parallel.random"
_TRACKER_WARNING = "CPU RNG state changed within GPU RNG context"
_GENERATOR = torch.default_generator


def get_rng_state(device="cuda") -> torch.Tensor:
    """Return a copy of the generator's state."""
    return _GENERATOR.get_state()


def set_rng_state(new_state: torch.Tensor, device="cuda") -> None:
    """Set the generator's state."""
    _GENERATOR.set_state(new_state)


def manual_seed(seed: int) -> None:
    """Seed the generator."""
    _GENERATOR.manual_seed(int(seed))


def initial_seed() -> int:
    """Return the seed that the generator was last given."""
    return _GENERATOR.initial_seed()


class Generators(Sequence):
    """Stand-in for `torch.cuda.default_generators` with one generator for all device indices."""

    def __len__(self) -> int:
        return torch.cuda.device_count()

    def __getitem__(self, index: int) -> torch.Generator:
        return _GENERATOR


def _data_loading_stream() -> Callable[[], contextlib.AbstractContextManager]:
    """Return contexts that draw from one stream, seeded at the first from the generator's seed."""
    state = None

    @contextlib.contextmanager
    def active():
        nonlocal state
        outer = _GENERATOR.get_state()
        if state is None:
            _GENERATOR.manual_seed(_GENERATOR.initial_seed())
        else:
            _GENERATOR.set_state(state)
        try:
            yield
        finally:
            state = _GENERATOR.get_state()
            _GENERATOR.set_state(outer)

    return active


def silence_tracker_warning() -> None:
    """Drop the tracker's warning about the CPU state, and no other one."""
    logger = logging.getLogger(_TRACKER_LOGGER)
    logger.addFilter(lambda record: _TRACKER_WARNING not in record.getMessage())


def replacements() -> list[Replacement]:
    """Return the replacements that keep data loading away from the device's state."""
    active = _data_loading_stream()
    return [
        Replacement(owner, name, active()(getattr(owner, name)))
        for owner, name in ((DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__"))
    ]
