# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Folders import those before them alone, also within functions; the overlay, few packages."""

import ast
import sys
from pathlib import Path

import pytest

from mini import REPOSITORY, imports
from overlay.source import imported, module_name

PROGRAM = "examples.mimo."
OF_PROGRAM = [
    {"common"},
    {"nemotron_vlm.model"},
    {"nemotron_vlm.energon", "nemotron_vlm.data"},
    {"nemotron_vlm.options"},
    {"nemotron_vlm.planner"},
    {"nemotron_vlm.loop"},
]
MIMO = "megatron.core.models.mimo."
OF_MIMO = [
    {"config"},
    {"bridge"},
    {"partition", "comm"},
    {"forward", "joint_optimizer"},
    {"schedule"},
    {"setup", "colocated_schedule"},
]


@pytest.mark.parametrize(
    ("root", "package", "layers"),
    [(REPOSITORY, PROGRAM, OF_PROGRAM), (REPOSITORY / "megatron_overlay", MIMO, OF_MIMO)],
    ids=["program", "overlay"],
)
def test_a_layer_imports_those_before_it(root: Path, package: str, layers: list[set[str]]):
    level = {package + name: number for number, names in enumerate(layers) for name in names}

    def layer(module: str) -> str | None:
        return next((name for name in level if f"{module}.".startswith(f"{name}.")), None)

    upward = []
    files = sorted((root / package.replace(".", "/")).rglob("*.py"))
    assert len(files) > 20
    for path in files:
        name = module_name(path.relative_to(root).as_posix())
        if own := layer(name):
            reached = set(map(layer, imports(path, name))) - {None}
            upward += [f"{name} → {to}" for to in reached if level[to] > level[own]]
    assert upward == []


OF_UPSTREAM = {"megatron", "numpy", "packaging", "torch"}
OF_KERNELS = {"causal_conv1d", "fla", "mamba_ssm", "triton"}
"""Packages of kernels, imported only by modules that are used where these are installed."""


def test_upstreams_scripts_need_no_package_that_they_did_not():
    """They import the overlay's modules."""
    files = sorted((REPOSITORY / "megatron_overlay").rglob("*.py"))
    assert files
    for path in files:
        package = module_name(path.parent.relative_to(REPOSITORY / "megatron_overlay").as_posix())
        names = (imported(node, package) for node in ast.parse(path.read_text()).body)
        found = {full.partition(".")[0] for each in names for _, full in each}
        assert found - sys.stdlib_module_names <= OF_UPSTREAM | OF_KERNELS, path
