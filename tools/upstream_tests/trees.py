# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A pristine and an applied copy of a checkout."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import OverlayError

_OURS = "megatron/core/cpu_runtime"  # upstream has nothing there
_NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", "build", ".venv")


@dataclass(frozen=True)
class Overlay:
    """The patch set in `root`, applied with the command for users."""

    root: Path

    def pristine_copy(self, checkout: Path, copy: Path) -> Path:
        """Copy `checkout`, and revert the overlay in the copy if it is applied."""
        _copy(checkout, copy)
        if (copy / _OURS).exists():
            self._run(copy, "--revert")
        return copy

    def applied_copy(self, pristine: Path, copy: Path) -> Path:
        """Copy a pristine tree and apply the overlay to the copy."""
        _copy(pristine, copy)
        self._run(copy)
        return copy

    def _run(self, tree: Path, *flags: str) -> None:
        command = [str(self.root / "tools/apply_overlay.sh"), str(tree), *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OverlayError(done.returncode, done.stderr.strip().removeprefix("error: "))


def _copy(tree: Path, copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(tree, copy, symlinks=True, ignore=_NOT_COPIED)
