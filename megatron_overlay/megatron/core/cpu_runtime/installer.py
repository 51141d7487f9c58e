# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan all replacements, make them, and rebind the names that modules imported before."""

import functools
import sys
from collections.abc import Callable

import torch

from megatron.core.cpu_runtime import collectives, cuda_api, devices, random
from megatron.core.cpu_runtime.replacement import Replacement

_REBOUND_PACKAGES = ("megatron", "torch.distributed")
_installed = False


def install() -> None:
    """Make CUDA and NCCL mean the CPU and gloo, for this process and for good.

    A second call changes nothing. Raises RuntimeError when CUDA is already in use: tensors and
    groups that live on the GPU would be left behind.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "the CPU runtime was asked for after CUDA had been initialised in this process: "
            "call megatron.core.cpu_runtime.install() before the first CUDA call"
        )
    plan = [
        *devices.replacements(),
        *cuda_api.replacements(),
        *collectives.replacements(),
        *random.replacements(),
        Replacement(torch, "compile", _eager),
    ]
    replaced = {id(old): (old, new) for old, new in map(_replace, plan) if callable(old)}
    _rebind_imported_names(replaced)
    if "torch._dynamo" in sys.modules:  # functions were decorated with torch.compile before
        torch.compiler.set_stance("force_eager")
    random.silence_tracker_warning()
    _installed = True


def _eager(model: Callable | None = None, **options) -> Callable:
    """`torch.compile` that returns what it is given: compiling takes longer than it saves here."""
    return model if model is not None else functools.partial(_eager, **options)


def _replace(replacement: Replacement) -> tuple[object, object]:
    """Make one replacement; returns what was there and what is there now."""
    owner, name, value = replacement
    old = getattr(owner, name)
    setattr(owner, name, value)
    return old, value


def _rebind_imported_names(replaced: dict[int, tuple[object, object]]) -> None:
    """Give modules that hold a replaced object under any name of theirs the new object.

    `replaced` maps the id of the old object to (old, new).
    """
    for module_name, module in list(sys.modules.items()):
        if not any(f"{module_name}.".startswith(f"{p}.") for p in _REBOUND_PACKAGES):
            continue
        if module_name.startswith(__package__):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)][1])
