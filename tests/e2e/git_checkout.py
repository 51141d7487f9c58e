# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The files of a git checkout of upstream, which has scripts that the PyPI package lacks."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ARCHIVES = REPOSITORY.parent / "shared/upstream"
sys.path.insert(0, str(REPOSITORY / "tools"))

from upstream_tests.trees import apply, clone  # noqa: E402


def put_pristine(tree: Path) -> bool:
    """Put the pristine files at `tree`; return False if there are none.

    They come from ``MEGATRON_GIT_CHECKOUT``, or else from the pin's package and an archive of what
    a checkout has beside it, in ``../shared/upstream``.
    """
    given = os.environ.get("MEGATRON_GIT_CHECKOUT")
    archives = sorted(ARCHIVES.glob("*-beside-the-package.tgz"))
    if given:
        clone(Path(given), tree)
    elif archives:
        subprocess.run([REPOSITORY / "tools/fetch_upstream.sh", tree], check=True)
        with tarfile.open(archives[-1]) as archive:
            archive.extractall(tree, filter="data")
    return bool(given or archives)


def put_applied(pristine: Path, tree: Path) -> None:
    """Put a copy of `pristine` with the overlay at `tree`."""
    apply(REPOSITORY, shutil.copytree(pristine, tree, ignore=shutil.ignore_patterns(".git")))
