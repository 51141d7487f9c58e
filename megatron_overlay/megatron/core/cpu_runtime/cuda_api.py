# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""`torch.cuda` on the CPU: a table of calls that have a true answer on a CPU; all others raise.

To support another call, add it to `ANSWERS`, but only if its answer on a CPU is a fact.
"""

import contextlib
import math
import os
import resource
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from megatron.core.cpu_runtime import random, streams
from megatron.core.cpu_runtime.replacement import Replacement, refusal

_MODULES = [torch.cuda] + [
    module
    for name, module in vars(torch.cuda).items()
    if getattr(module, "__name__", "") == f"torch.cuda.{name}" and isinstance(module, ModuleType)
    if not name.startswith("_") and name != "amp"
]
_TENSOR_TYPES = "BFloat16 Bool Byte Char Double Float Half Int Long Short".split()
_device_index = 0


def _index(device: Any) -> int:
    """Return the index that `device` names, or the current one."""
    if isinstance(device, int):
        return device if device >= 0 else _device_index
    index = None if device is None else torch.device(device).index
    return _device_index if index is None else index


def current_device() -> int | torch.device:
    """Return the index last passed to `set_device`, initially 0; or the default, if it is meta."""
    default = torch.get_default_device()
    return default if default.type == "meta" else _device_index


def set_device(device) -> None:
    """Remember the index; all indices mean the CPU."""
    global _device_index
    _device_index = _index(device)


def device_count() -> int:
    """Return the number of ranks on this host, each of which has one device."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class device:
    """`with torch.cuda.device(i)`: `i` is the current index inside; None changes nothing."""

    def __init__(self, device):
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        set_device(self.idx)

    def __exit__(self, *exc_info) -> None:
        set_device(self.prev_idx)


def get_device_properties(device=None) -> SimpleNamespace:
    """Return the host's memory in bytes and its cores, and compute capability 0.0.

    The capability is below every requirement, so none is met.
    """
    return SimpleNamespace(
        name="cpu",
        major=0,
        minor=0,
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        multi_processor_count=os.cpu_count() or 1,
    )


def memory_allocated(device=None) -> int:
    """Return the resident memory of this process now, in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def max_memory_allocated(device=None) -> int:
    """Return the peak resident memory of this process so far, in bytes."""
    # The kernel updates its peak with a delay.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, memory_allocated())


class _MemoryStats(dict):
    def __missing__(self, key):
        raise refusal(f"torch.cuda.memory_stats()[{key!r}]")


def memory_stats(device=None) -> dict[str, int]:
    """Return this process's resident bytes by the CUDA allocator's names; other names raise."""
    now, peak = memory_allocated(), max_memory_allocated()
    return _MemoryStats(
        (f"{kind}_bytes.all.{when}", value)
        for kind in ("allocated", "reserved")
        for when, value in (("current", now), ("peak", peak))
    )


def _returns(value: Any) -> Callable:
    def answer(*args, **kwargs):
        return value

    return answer


ANSWERS: dict[str, Any] = {
    "is_available": _returns(True),
    "is_initialized": _returns(True),
    "is_bf16_supported": _returns(True),
    "is_current_stream_capturing": _returns(False),
    "init": _returns(None),
    "synchronize": _returns(None),
    "empty_cache": _returns(None),
    "current_device": current_device,
    "set_device": set_device,
    "device_count": device_count,
    "device": device,
    "get_device_properties": get_device_properties,
    "get_device_capability": _returns((0, 0)),
    "get_device_name": _returns("cpu"),
    "memory_allocated": memory_allocated,
    "memory_reserved": memory_allocated,
    "max_memory_allocated": max_memory_allocated,
    "max_memory_reserved": max_memory_allocated,
    "memory_stats": memory_stats,
    **dict.fromkeys(("temperature", "power_draw", "utilization", "clock_rate"), _returns(math.nan)),
    "Stream": streams.Stream,
    "Event": streams.Event,
    "stream": streams.stream,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "set_stream": streams.set_stream,
    "get_rng_state": random.get_rng_state,
    "set_rng_state": random.set_rng_state,
    "manual_seed": random.manual_seed,
    "manual_seed_all": random.manual_seed,
    "initial_seed": random.initial_seed,
    "nvtx.range_push": _returns(None),
    "nvtx.range_pop": _returns(None),
    "nvtx.range": _returns(contextlib.nullcontext()),
}


def _refuse(name: str, original: Any) -> Any:
    """Return a stand-in for `torch.cuda.<name>` that raises when it is called or instantiated."""

    def refuse(*args, **kwargs):
        raise refusal(f"torch.cuda.{name}")

    if isinstance(original, type):  # Stays a class: annotations and isinstance() use it.
        return type(original.__name__, (), {"__new__": refuse})
    return refuse


def _public_callables(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """CUDA's own public callables in `module`, without exceptions, storages and tensor types."""
    for name, value in list(vars(module).items()):
        own = callable(value) and str(getattr(value, "__module__", "")).startswith("torch.cuda")
        if not own or name.startswith("_") or name.endswith(("Storage", "Tensor")):
            continue
        if isinstance(value, type) and issubclass(value, BaseException):
            continue
        yield name, value


def replacements() -> list[Replacement]:
    """Replacements, by answers or errors, of all public callables of `torch.cuda`."""
    plan, stand_ins = [], {}
    for module in _MODULES:
        prefix = "nvtx." if module is torch.cuda.nvtx else ""
        for name, value in _public_callables(module):
            if id(value) not in stand_ins:
                key = prefix + name
                stand_ins[id(value)] = ANSWERS[key] if key in ANSWERS else _refuse(key, value)
            plan.append(Replacement(module, name, stand_ins[id(value)]))
    plan += [
        Replacement(torch.cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
        for kind in _TENSOR_TYPES
    ]
    plan += [
        Replacement(torch.cuda, "default_generators", random.Generators()),
        # PyTorch calls this when an op really reaches CUDA, through an argument not redirected.
        Replacement(torch.cuda, "_lazy_init", _refuse("_lazy_init", None)),
        # A CUDA build of PyTorch would return CUDA without asking `torch.cuda`.
        Replacement(torch.accelerator, "current_accelerator", _returns(None)),
    ]
    return plan
