# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Import the modules of this folder that call kernels of GPU packages, if these are installed."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

from packaging.specifiers import SpecifierSet

VERSIONS = {"causal_conv1d": ">=1.7,<2", "fla": ">=0.4.2,<0.5", "mamba_ssm": ">=2.3,<2.4"}
"""Versions with the private functions called here, as in pyproject's extra ``gpu``."""

PACKAGES = {
    "gated_delta.kernels": ["fla"],
    "kernel_conv": ["causal_conv1d"],
    "mamba.kernels": ["causal_conv1d", "mamba_ssm"],
}
"""GPU packages that each module calls."""


@cache
def gpu_kernels(module: str) -> ModuleType | None:
    """A module of this folder; None if a package is missing, so that reference ops are used.

    Raises:
        ImportError: a package has a version outside :data:`VERSIONS`.
    """
    packages = PACKAGES[module]
    if any(importlib.util.find_spec(package) is None for package in packages):
        return None
    for package in packages:
        version, found = VERSIONS[package], importlib.import_module(package).__version__
        if found not in SpecifierSet(version, prereleases=True):
            raise ImportError(f"state passing needs {package} {version} on GPUs, found {found}")
    return importlib.import_module(f"{__package__}.{module}")
