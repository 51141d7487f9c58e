# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plan and make all replacements, and rebind names that modules have already imported."""

import sys

import torch

from megatron.core.cpu_runtime import collectives, compiler, cuda_api, devices, random
from megatron.core.cpu_runtime.replacement import Replacement

_REBOUND_PACKAGES = ("megatron", "torch.distributed")
_installed = False


def install() -> None:
    """Make CUDA and NCCL mean the CPU and gloo in this process, permanently.

    A second call changes nothing. Raises RuntimeError if CUDA is already initialized, as existing
    tensors and groups would stay on the GPU.
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
        Replacement(torch, "compile", compiler.eager),
    ]
    replaced = {}
    for owner, name, new in plan:
        old = getattr(owner, name)
        setattr(owner, name, new)
        if callable(old):
            replaced[id(old)] = old, new
    _rebind_imported_names(replaced)
    compiler.leave_out()
    random.silence_tracker_warning()
    _installed = True


def _rebind_imported_names(replaced: dict[int, tuple[object, object]]) -> None:
    """Rebind every name by which a module holds a replaced object to the new object.

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
