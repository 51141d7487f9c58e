# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A pristine and an applied tree of a git checkout."""

import shutil
import subprocess
from pathlib import Path

from overlay.errors import NOT_THE_PIN, OverlayError
from overlay.git import user_git


def clone(checkout: Path, tree: Path, branch: str | None = None) -> Path:
    """Clone a git checkout to `tree`, in place of what is there; return `tree`.

    It gets the commit that is checked out there, or a branch.

    Raises:
        OverlayError: `checkout` is not the top of a git checkout, or lacks the branch.
    """
    shutil.rmtree(tree, ignore_errors=True)
    tree.parent.mkdir(parents=True, exist_ok=True)
    which = ("--branch", branch) if branch else ()
    done = user_git(Path(), "clone", "--quiet", *which, "--", str(checkout), str(tree))
    if done.returncode:
        of = f" with branch {branch}" if branch else ""
        raise OverlayError(NOT_THE_PIN, f"{checkout} is not the top of a git checkout{of}")
    return tree


def apply(root: Path, tree: Path) -> None:
    """Apply the patch set in `root` with the command for users.

    Raises:
        OverlayError: the command refuses the tree.
    """
    command = [str(root / "tools/apply_overlay.sh"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OverlayError(done.returncode, done.stderr.strip().removeprefix("error: "))
