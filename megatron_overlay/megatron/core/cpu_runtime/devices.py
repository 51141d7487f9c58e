# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Redirect device arguments that name a CUDA device to the CPU.

The functions that take a device are wrapped one by one, instead of watching all ops with a
`TorchFunctionMode`: a mode is not active inside autograd's backward, and it slows down every op.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

from megatron.core.cpu_runtime.replacement import Replacement

_CPU = torch.device("cpu")

_LIKE = "empty_like zeros_like ones_like full_like rand_like randn_like randint_like normal".split()
_NEW = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()
_FACTORY_MODULES = (torch, torch.fft, torch.nested)


def to_cpu(device: Any) -> Any:
    """The CPU for a CUDA device (`"cuda:1"`, `torch.device("cuda")`, an index), else `device`."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.partition(":")[0] == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return device


def _with_cpu_device(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def wrapper(*args, **kwargs):
        if kwargs.get("device") is not None:
            kwargs["device"] = to_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapper


def _factories() -> Iterator[tuple[Any, str]]:
    """`(owner, name)` of every function that creates a tensor and takes a keyword `device`."""
    # PyTorch keeps the constructors that `with torch.device(…)` redirects in a cached set. The set
    # must be filled before they are wrapped, as PyTorch looks up the unwrapped functions in it.
    constructors = _device_constructors()
    for module in _FACTORY_MODULES:
        for name, value in list(vars(module).items()):
            if callable(value) and not isinstance(value, type) and value in constructors:
                yield module, name
    for name in _LIKE:
        yield torch, name
    for name in _NEW:
        yield torch.Tensor, name


def _to(original: Callable) -> Callable:
    """Wrap `to(device, …)`, `to(dtype)` and `to(other)` of tensors and modules."""

    @functools.wraps(original)
    def to(self, *args, **kwargs):
        if args:
            args = (to_cpu(args[0]), *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = to_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _tensor_methods() -> dict[str, Callable]:
    original_to, original_type = torch.Tensor.to, torch.Tensor.type

    @functools.wraps(torch.Tensor.cuda)
    def cuda(self, device=None, non_blocking=False, memory_format=torch.preserve_format):
        return original_to(self, _CPU, memory_format=memory_format)

    @functools.wraps(original_type)
    def type_(self, dtype=None, *args, **kwargs):
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        if dtype is not None:
            return original_type(self, dtype, *args, **kwargs)
        # Megatron's optimizers tell 16-bit from 32-bit parameters by CUDA's type names.
        name = original_type(self)
        return name.replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else name

    @functools.wraps(torch.Tensor.pin_memory)
    def pin_memory(self, device=None):
        return self

    @functools.wraps(torch.Tensor.record_stream)
    def record_stream(self, stream):
        return None

    return {
        "to": _to(original_to),
        "cuda": cuda,
        "type": type_,
        "pin_memory": pin_memory,
        "record_stream": record_stream,
    }


def _device_context_init() -> Callable:
    original = DeviceContext.__init__

    @functools.wraps(original)
    def init(self, device):
        original(self, to_cpu(device))

    return init


def _autocast_init() -> Callable:
    original = torch.autocast.__init__

    @functools.wraps(original)
    def init(self, device_type, *args, **kwargs):
        original(self, _cpu_type(device_type), *args, **kwargs)

    return init


def _profile_init() -> Callable:
    original = torch.autograd.profiler.profile.__init__

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        if kwargs.get("use_device") == "cuda":
            kwargs["use_device"] = None
        original(self, *args, **kwargs)

    return init


def _cpu_type(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type


def _autocast_query(original: Callable) -> Callable:
    @functools.wraps(original)
    def query(device_type: str = "cuda"):
        return original(_cpu_type(device_type))

    return query


def _load(original: Callable) -> Callable:
    @functools.wraps(original)
    def load(f, map_location=None, *args, **kwargs):
        if map_location is None or isinstance(map_location, (str, torch.device)):
            map_location = to_cpu(map_location) or _CPU
        return original(f, map_location, *args, **kwargs)

    return load


def replacements() -> list[Replacement]:
    """All replacements of functions, methods and contexts that take a device."""
    plan = [
        Replacement(owner, name, _with_cpu_device(getattr(owner, name)))
        for owner, name in _factories()
    ]
    plan += [Replacement(torch.Tensor, name, fn) for name, fn in _tensor_methods().items()]
    plan += [
        Replacement(torch, name, _autocast_query(getattr(torch, name)))
        for name in ("is_autocast_enabled", "get_autocast_dtype")
    ]
    load = _load(torch.load)
    plan += [
        Replacement(torch, "load", load),
        Replacement(torch.serialization, "load", load),
        Replacement(torch.nn.Module, "to", _to(torch.nn.Module.to)),
        Replacement(DeviceContext, "__init__", _device_context_init()),
        Replacement(torch.autograd.profiler.profile, "__init__", _profile_init()),
        Replacement(torch.autocast, "__init__", _autocast_init()),
    ]
    return plan
