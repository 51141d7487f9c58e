# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""One attribute to replace: what the parts of the CPU runtime plan and the installer executes."""

from typing import Any, NamedTuple


class Replacement(NamedTuple):
    """`setattr(owner, name, value)`, where `owner` is a module or a class."""

    owner: Any
    name: str
    value: Any


def refusal(name: str) -> NotImplementedError:
    """The error for a CUDA call that the CPU runtime has no honest answer to."""
    return NotImplementedError(
        f"{name} has no equivalent in the CPU runtime: run this on a GPU, switch off the option "
        f"that needs it, or add it to megatron/core/cpu_runtime/cuda_api.py"
    )
