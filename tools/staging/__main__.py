# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Entry point: ``python tools/staging CHECKOUT``, by ``stage_upstream_pr.sh``."""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from command_line import Parser  # noqa: E402
from overlay.__main__ import REPOSITORY, reported  # noqa: E402
from overlay.errors import FAILED, USAGE, OverlayError  # noqa: E402
from overlay.git import call, write_files  # noqa: E402
from overlay.patchset import PatchSet  # noqa: E402
from staging.features import Features  # noqa: E402

CPU_RUNTIME = "megatron/core/cpu_runtime/"
PYTHON_311 = b"import typing, typing_extensions\ntyping.override = typing_extensions.override\n"
"""Upstream needs Python 3.12, for this name only."""


@contextlib.contextmanager
def staged(features: Features, checkout: Path, *names: str) -> Iterator[Path]:
    """Provide a temporary worktree of HEAD with a commit for each feature and what it needs.

    Raises:
        OverlayError: a patch does not apply, or git refuses something else.
    """
    with tempfile.TemporaryDirectory(prefix="staging-") as folder:
        tree = Path(folder, "tree")
        call(checkout, "worktree", "add", "--quiet", "--detach", str(tree), "HEAD")
        try:
            for name in features.stack(*names):
                try:
                    call(tree, "apply", "--allow-empty", stdin=features.patch(name))
                except OverlayError as error:
                    raise OverlayError(FAILED, f"{name}: {error.lines[0]}") from None
                write_files(tree, features.files_of(name))
                call(tree, "add", "--force", "--all")
                call(tree, "commit", "--quiet", "--signoff", "-m", features.message(name))
            yield tree
        finally:
            call(checkout, "worktree", "remove", "--force", str(tree))


def fails(features: Features, checkout: Path, name: str) -> bool:
    """Run a feature's tests upon what it needs, and upon our CPU runtime without a GPU."""
    variables = {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    lent = {p: s.read_bytes() for p, s in features.sources.items() if p.startswith(CPU_RUNTIME)}
    with staged(features, checkout, name) as tree:
        write_files(tree, lent | {"sitecustomize.py": PYTHON_311})
        how = {"cwd": tree, "env": os.environ | variables}
        return any(subprocess.run(c.split(), **how).returncode for c in features.commands(name))


@reported
def main(argv: list[str] | None = None) -> int:
    """Return 0 if done, 1 if git refuses or tests fail, 2 for a wrong command line."""
    what = "Stage features on HEAD of a git checkout: a commit each, upon those that it needs."
    parser = Parser(prog="stage_upstream_pr.sh", description=what)
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    parser.add_argument("feature", nargs="*", metavar="FEATURE", help="by default all")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--branch", metavar="B", help="make this branch, which is new")
    which.add_argument("--try", action="store_true", help="run the tests of each")
    options = parser.parse_args(argv)
    patchset = PatchSet(options.root)
    features = Features(patchset, patchset.lock.next or "")
    names = options.feature or list(features.by_name)
    if unknown := [name for name in names if name not in features.by_name]:
        known = ", ".join(features.by_name)
        raise OverlayError(USAGE, f"{unknown[0]}: no such feature; there are {known}")
    if options.branch:
        with staged(features, options.checkout, *names) as tree:
            call(tree, "branch", "--no-track", options.branch)
    elif failed := [name for name in names if fails(features, options.checkout, name)]:
        raise OverlayError(FAILED, f"tests fail: {', '.join(failed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
