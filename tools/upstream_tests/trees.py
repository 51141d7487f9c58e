# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A pristine and an applied tree of a git checkout."""

import shutil
import subprocess
from pathlib import Path

from overlay.errors import NOT_THE_PIN, OverlayError
from overlay.git import user_git


def clone(checkout: Path, tree: Path) -> Path:
    """Clone the HEAD of a git checkout to `tree`, in place of what is there; return `tree`.

    Raises:
        OverlayError: `checkout` is not the top of a git checkout.
    """
    shutil.rmtree(tree, ignore_errors=True)
    tree.parent.mkdir(parents=True, exist_ok=True)
    done = user_git(Path(), "clone", "--quiet", "--", str(checkout), str(tree))
    if done.returncode:
        raise OverlayError(NOT_THE_PIN, f"{checkout} is not the top of a git checkout")
    return tree


def apply(root: Path, tree: Path) -> Path:
    """Apply the patch set in `root` with the command for users; return `tree`.

    Raises:
        OverlayError: the command refuses the tree.
    """
    command = [str(root / "tools/apply_overlay.sh"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OverlayError(done.returncode, done.stderr.strip().removeprefix("error: "))
    return tree
