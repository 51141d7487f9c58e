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
    """Return the CPU for a CUDA device (`"cuda:1"`, `torch.device("cuda")`, 1), else `device`."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.partition(":")[0] == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return device


def _with(
    original: Callable, place: int, name: str, change: Callable[[Any], Any], default: Any = ...
) -> Callable:
    """Wrap a function so that ``change`` is applied to one of its arguments.

    Args:
        place, name: index and keyword of the argument.
        default: value that is changed and passed where the argument is left out, if given.
    """

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        if len(args) > place:
            args = (*args[:place], change(args[place]), *args[place + 1 :])
        elif name not in kwargs and default is not ...:
            kwargs[name] = default
        if name in kwargs:
            kwargs[name] = change(kwargs[name])
        return original(*args, **kwargs)

    return wrapper


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
    """Yield `(owner, name)` of each function that makes a tensor and takes a keyword `device`."""
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

    return {
        "to": _with(original_to, 1, "device", to_cpu),
        "cuda": cuda,
        "type": type_,
        "pin_memory": lambda self, device=None: self,
        "record_stream": lambda self, stream: None,
    }


def _cpu_type(device_type: str | None) -> str | None:
    return "cpu" if device_type == "cuda" else device_type


def _map_to_cpu(map_location: Any) -> Any:
    if map_location is None or isinstance(map_location, (str, torch.device)):
        return to_cpu(map_location) or _CPU
    return map_location


def replacements() -> list[Replacement]:
    """Return all replacements of functions, methods and contexts that take a device."""
    plan = [
        Replacement(owner, name, _with_cpu_device(getattr(owner, name)))
        for owner, name in _factories()
    ]
    plan += [Replacement(torch.Tensor, name, fn) for name, fn in _tensor_methods().items()]
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        query = _with(getattr(torch, name), 0, "device_type", _cpu_type, default="cuda")
        plan.append(Replacement(torch, name, query))
    load = _with(torch.load, 1, "map_location", _map_to_cpu, default=None)
    plan += [Replacement(owner, "load", load) for owner in (torch, torch.serialization)]
    plan.append(Replacement(torch.nn.Module, "to", _with(torch.nn.Module.to, 1, "device", to_cpu)))
    profile = torch.autograd.profiler.profile
    return plan + [
        Replacement(owner, "__init__", _with(owner.__init__, place, name, change))
        for owner, place, name, change in (
            (DeviceContext, 1, "device", to_cpu),
            (torch.autocast, 1, "device_type", _cpu_type),
            (profile, 2, "use_device", lambda device: None if device == "cuda" else device),
        )
    ]
