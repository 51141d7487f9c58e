# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""No circle of imports among our files, the files that we patch, and MIMO's.

Every import counts, also within functions and for type checkers. Upstream's other files, which
import each other in one large circle through functions, are left out.
"""

import ast
import shutil
from pathlib import Path

from mini import REPOSITORY, run
from overlay.source import module_name

MIMO = "megatron.core.models.mimo"

FACTORIES = {
    frozenset(
        {"megatron.core.optimizer", f"{MIMO}.optimizer", f"{MIMO}.joint_optimizer.optimizer"}
    ),
    frozenset(
        {
            *(f"megatron.core.pipeline_parallel.{name}" for name in ("schedules", "stage_order")),
            "megatron.core.transformer.cuda_graphs",
            f"{MIMO}.colocated_schedule",
            *(f"{MIMO}.schedule.{n}" for n in ("encoder_work", "bubble_plan", "graph_capture")),
        }
    ),
}
"""Upstream's factory of optimizers makes MIMO's, which calls it for each module; ours is between.
Its factory of schedules hands out ours, which runs the pipeline that the factory has for it, and
plans by that pipeline's own order. Upstream's graphs and schedules import each other."""


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
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join((parents if node.level else []) + [node.module or ""]).rstrip(".")
            modules = {f"{source}.{alias.name}" for alias in node.names}
            found |= modules & known or {source}
    return found & known


def circles(checkout: Path, wanted: set[str]) -> set[frozenset[str]]:
    """Return the sets of modules that import each other, directly or through others of the set."""
    paths = checkout.rglob("megatron/**/*.py")
    files = {module_name(path.relative_to(checkout).as_posix()): path for path in paths}
    known = {name for name in files if name in wanted or name.startswith(MIMO)}
    direct = {name: imports(files[name], name, known - {name}) for name in known}

    def reached(name: str) -> set[str]:
        seen, ahead = set(), list(direct[name])
        while ahead:
            if (module := ahead.pop()) not in seen:
                seen.add(module)
                ahead += direct[module]
        return seen

    reach = {name: reached(name) for name in known}
    return {
        frozenset(other for other in reach[name] if name in reach[other])
        for name in known
        if name in reach[name]
    }


def test_there_are_no_circles_but_upstreams_own(upstreams, tmp_path):
    wanted = patched_and_ours()
    before = circles(upstreams, wanted)
    checkout = shutil.copytree(upstreams, tmp_path / "checkout")
    assert run("apply", checkout).code == 0
    assert circles(checkout, wanted) - before == FACTORIES


def test_a_circle_is_found_through_functions_relative_imports_and_packages(tmp_path):
    folder = tmp_path / "megatron/core/models/mimo"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from .first import x\n")
    (folder / "first.py").write_text(f"import {MIMO}.second\nx = 0\n")
    (folder / "second.py").write_text("def f():\n    from . import third\n")
    (folder / "third.py").write_text(f"from {MIMO} import x\n")
    names = {f"{MIMO}.{name}" for name in ("first", "second", "third")}
    assert circles(tmp_path, set()) == {frozenset(names | {MIMO})}
