# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Upstream's scripts, which import the overlay's modules, need no package that they did not."""

import ast
import sys
from pathlib import Path

from mini import REPOSITORY

OVERLAY = REPOSITORY / "megatron_overlay"
OF_UPSTREAM = {"megatron", "numpy", "packaging", "torch"}
OF_KERNELS = {"causal_conv1d", "fla", "mamba_ssm", "triton"}
"""Packages of kernels, imported only by modules that are used where these are installed."""


def packages(path: Path) -> set[str]:
    """Return the packages that importing a file imports."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names


def test_no_package_beside_upstreams_own():
    files = sorted(OVERLAY.rglob("*.py"))
    assert files
    for path in files:
        assert packages(path) <= OF_UPSTREAM | OF_KERNELS, path
