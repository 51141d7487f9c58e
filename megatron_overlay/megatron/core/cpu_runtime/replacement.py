# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""One attribute to replace, planned by a module of the CPU runtime and set by the installer."""

from typing import Any, NamedTuple


class Replacement(NamedTuple):
    """`setattr(owner, name, value)`, where `owner` is a module or a class."""

    owner: Any
    name: str
    value: Any


def refusal(name: str) -> NotImplementedError:
    """Return the error for a CUDA call that has no true answer on a CPU."""
    return NotImplementedError(
        f"{name} has no equivalent in the CPU runtime: run this on a GPU, switch off the option "
        f"that needs it, or add it to megatron/core/cpu_runtime/cuda_api.py"
    )
