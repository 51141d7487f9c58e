# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The patch set in our repository: the lock, the patches, and the overlay files."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from overlay.checkout import check_relative, sha256
from overlay.errors import FAILED, OverlayError
from overlay.lock import BY_OVERLAY, Lock

# Folder in our repository -> its place in a checkout.
OVERLAY_ROOTS = {"megatron_overlay": "", "examples/mimo": "examples/mimo"}
_PATCH_NAME = re.compile(r"\d{4}-[a-z0-9-]+\.patch")


@dataclass(frozen=True)
class Source:
    """An overlay file in our repository."""

    path: Path
    sha256: str
    executable: bool


class PatchSet:
    """The patch set, read from the repository at ``root``."""

    def __init__(self, root: Path):
        self.root = Path(os.path.realpath(root))
        self.patch_dir = self.root / "patches"
        self.lock = Lock.read(self.patch_dir / "upstream.toml")
        self.overlay = _overlay_files(self.root)

    def series(self) -> dict[str, bytes]:
        """Return the patches by name, in the order of their numbers, in which they apply."""
        names = sorted(path.name for path in self.patch_dir.glob("*.patch"))
        for name, following in zip(names, [*names[1:], "end"], strict=True):
            if not _PATCH_NAME.fullmatch(name):
                raise OverlayError(FAILED, f"patches/{name} is not named NNNN-topic.patch")
            if name[:4] == following[:4]:
                raise OverlayError(FAILED, f"patches/{name} and {following} have the same number")
        return {name: (self.patch_dir / name).read_bytes() for name in names}

    def check_against_lock(self) -> None:
        """Refuse a patch set that was edited after the lock was made.

        This and the hashes of upstream's files determine the result of applying the patch set.
        """
        locked, found = self.lock.patches, {n: sha256(p) for n, p in self.series().items()}
        stale = [f"patches/{n}" for n in sorted({*found, *locked}) if found.get(n) != locked.get(n)]
        for path, entry in self.lock.files.items():
            source = self.overlay.get(path)
            ours = {source.sha256} if source else set()
            if ours != (set(entry.after.values()) if entry.by == (BY_OVERLAY,) else set()):
                stale.append(f"overlay file {path}")
        if stale:
            raise OverlayError(
                FAILED, *(f"{s} differs from the lock: run `make lock`" for s in stale)
            )


def _overlay_files(root: Path) -> dict[str, Source]:
    """Return the overlay files by their path in a checkout; refuse symlinks among them."""
    found = {}
    for ours, theirs in OVERLAY_ROOTS.items():
        for path in sorted((root / ours).rglob("*")):
            if path.is_symlink():
                what = f"{path.relative_to(root)} is a symlink: overlay files are real"
                raise OverlayError(FAILED, what)
            if path.is_file() and path.suffix != ".pyc":
                relative = Path(theirs, path.relative_to(root / ours)).as_posix()
                check_relative(relative, ours)
                digest = sha256(path.read_bytes())
                found[relative] = Source(path, digest, os.access(path, os.X_OK))
    return found
