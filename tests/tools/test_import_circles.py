# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Imports: no circle among our files, those that we patch, and MIMO's, and no further package.

Every import counts, also within functions and for type checkers. Upstream's other files, which
import each other in one large circle through functions, are left out.
"""

import ast
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy.sparse.csgraph import connected_components

from mini import REPOSITORY, run
from overlay.source import imported, module_name

MIMO = "megatron.core.models.mimo"

FACTORIES = {
    frozenset(
        {"megatron.core.optimizer", f"{MIMO}.optimizer", f"{MIMO}.joint_optimizer.optimizer"}
    ),
    frozenset(
        {
            "megatron.core.pipeline_parallel.schedules",
            "megatron.core.transformer.cuda_graphs",
            f"{MIMO}.colocated_schedule",
        }
    ),
}
"""Upstream's factory of optimizers makes MIMO's, which calls it for each module; ours is between.
Its factory of schedules hands out ours, which runs the pipeline that the factory has for it.
Upstream's graphs and schedules import each other."""


def patched_and_ours() -> set[str]:
    overlay = REPOSITORY / "megatron_overlay"
    ours = {module_name(path.relative_to(overlay).as_posix()) for path in overlay.rglob("*.py")}
    lines = [
        line for p in (REPOSITORY / "patches").glob("*.patch") for line in p.read_text().split("\n")
    ]
    return ours | {module_name(line[6:]) for line in lines if line.startswith("+++ b/")}


def imports(path: Path, name: str, known: set[str]) -> set[str]:
    """The modules of ``known`` that a file imports, anywhere in it."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {full for node in nodes for _, full in imported(node, package)}
    found |= {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    modules = {full if full in known else full.rpartition(".")[0] for full in found}
    return modules & known


def circles(checkout: Path, wanted: set[str]) -> set[frozenset[str]]:
    """Return the sets of modules that import each other, directly or through others of the set."""
    paths = checkout.rglob("megatron/**/*.py")
    files = {module_name(path.relative_to(checkout).as_posix()): path for path in paths}
    known = {name for name in files if name in wanted or name.startswith(MIMO)}
    direct = {name: imports(files[name], name, known - {name}) for name in known}
    graph = np.array([[other in direct[name] for other in known] for name in known])
    _, labels = connected_components(graph, connection="strong")
    found = defaultdict(set)
    for name, label in zip(known, labels.tolist(), strict=True):
        found[label].add(name)
    return {frozenset(circle) for circle in found.values() if len(circle) > 1}


def test_there_are_no_circles_but_upstreams_own(upstreams, tmp_path):
    wanted = patched_and_ours()
    before = circles(upstreams, wanted)
    checkout = shutil.copytree(upstreams, tmp_path / "checkout")
    assert run("apply", checkout).code == 0
    assert circles(checkout, wanted) - before == FACTORIES


OF_UPSTREAM = {"megatron", "numpy", "packaging", "torch"}
OF_KERNELS = {"causal_conv1d", "fla", "mamba_ssm", "triton"}
"""Packages of kernels, imported only by modules that are used where these are installed."""


def test_upstreams_scripts_need_no_package_that_they_did_not():
    """They import the overlay's modules."""
    files = sorted((REPOSITORY / "megatron_overlay").rglob("*.py"))
    assert files
    for path in files:
        found = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.partition(".")[0])
        assert found - sys.stdlib_module_names <= OF_UPSTREAM | OF_KERNELS, path
