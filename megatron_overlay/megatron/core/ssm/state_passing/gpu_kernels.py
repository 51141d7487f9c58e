# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Modules of this folder that call kernels of GPU packages, where these are installed."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

PACKAGES = {
    "gated_delta_kernels": {"fla": "0.4"},
    "kernel_conv": {"causal_conv1d": None},
    "mamba_kernels": {"causal_conv1d": None, "mamba_ssm": "2.3"},
}
"""What a module calls, and the version of those packages whose private kernels it calls."""


@cache
def gpu_kernels(module: str) -> ModuleType | None:
    """A module of this folder; None where a package is missing and the reference ops serve.

    Raises:
        ImportError: private kernels are called, and another version is installed.
    """
    packages = PACKAGES[module]
    if any(importlib.util.find_spec(package) is None for package in packages):
        return None
    for package, version in packages.items():
        if version is None:
            continue
        found = importlib.import_module(package).__version__
        if not found.startswith(f"{version}."):
            raise ImportError(
                f"state passing calls private kernels of {package} {version}, not {found}"
            )
    return importlib.import_module(f"{__package__}.{module}")
