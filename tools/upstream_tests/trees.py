# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A pristine and an applied copy of a checkout."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from overlay.checkout import Checkout
from overlay.errors import NOT_THE_PIN, OverlayError
from upstream_tests.selection import TESTS

_OURS = "megatron/core/cpu_runtime"  # upstream has nothing there
_NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", "build", ".venv")


def check(checkout: Path) -> None:
    """Raise OverlayError unless ``checkout`` is a Megatron-LM checkout with its tests."""
    Checkout(checkout)
    if not (checkout / TESTS / "conftest.py").is_file():
        raise OverlayError(
            NOT_THE_PIN,
            f"{checkout} has no {TESTS}: the PyPI package lacks upstream's tests; "
            f"take a git checkout of the tag",
        )


@dataclass(frozen=True)
class Overlay:
    """The patch set in `root`, applied with the command for users."""

    root: Path

    def _run(self, tree: Path, *flags: str) -> str:
        command = [str(self.root / "tools/apply_overlay.sh"), str(tree), *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OverlayError(done.returncode, done.stderr.strip().removeprefix("error: "))
        return done.stdout

    def pristine_copy(self, checkout: Path, copy: Path) -> Path:
        """Copy `checkout`, and revert the overlay in the copy if it is applied."""
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(checkout, copy, symlinks=True, ignore=_NOT_COPIED)
        if (copy / _OURS).exists():
            self._run(copy, "--revert")
        return copy

    def applied_copy(self, pristine: Path, copy: Path) -> Path:
        """Copy a pristine tree and apply the overlay to the copy."""
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(pristine, copy, symlinks=True, ignore=_NOT_COPIED)
        self._run(copy)
        return copy
