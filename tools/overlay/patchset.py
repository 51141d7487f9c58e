# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The patch set on our side: the lock, the series of patches, and the overlay files."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from overlay.checkout import check_relative, sha256
from overlay.errors import FAILED, OverlayError
from overlay.lock import BY_OVERLAY, Lock

# Folder of ours -> where it lands in a checkout.
OVERLAY_ROOTS = {"megatron_overlay": "", "examples/mimo": "examples/mimo"}
_PATCH_NAME = re.compile(r"\d{4}-[a-z0-9-]+\.patch")


@dataclass(frozen=True)
class Source:
    """An overlay file in our repository."""

    path: Path
    sha256: str
    executable: bool


class PatchSet:
    """Everything that an application needs, read from the repository at ``root``."""

    def __init__(self, root: Path):
        self.root = Path(os.path.realpath(root))
        self.patch_dir = self.root / "patches"
        self.lock = Lock.read(self.patch_dir / "upstream.toml")
        self.overlay = _overlay_files(self.root)

    def series(self) -> dict[str, bytes]:
        """The patches by name, in the order in which they apply."""
        return {name: self._patch(name) for name in self._names()}

    def _names(self) -> list[str]:
        return (self.patch_dir / "series").read_text().split()

    def by_number(self) -> dict[str, bytes]:
        """The patches that lie in ``patches/``, in the order of their numbers: the next series."""
        names = sorted(path.name for path in self.patch_dir.glob("*.patch"))
        for name, following in zip(names, [*names[1:], "end"], strict=True):
            if name[:4] == following[:4]:
                raise OverlayError(FAILED, f"patches/{name} and {following} have the same number")
        return {name: self._patch(name) for name in names}

    def _patch(self, name: str) -> bytes:
        if not _PATCH_NAME.fullmatch(name):
            raise OverlayError(FAILED, f"patches: {name!r} is not named NNNN-topic.patch")
        try:
            return (self.patch_dir / name).read_bytes()
        except OSError as error:
            raise OverlayError(FAILED, f"patches/{name}: {error.strerror}") from None

    def check_against_lock(self) -> None:
        """Refuse a patch set that was edited after the lock was made.

        Given this and the hashes of upstream's files, what application gives is determined.
        """
        lines = []
        series = self.series()
        if list(series) != list(self.lock.patches):
            lines.append("patches/series lists other patches than the lock does")
        for name, patch in series.items():
            if sha256(patch) != self.lock.patches.get(name):
                lines.append(f"patches/{name} differs from the lock")
        for path, entry in self.lock.files.items():
            source = self.overlay.get(path)
            if (entry.by == (BY_OVERLAY,)) != (source is not None):
                lines.append(f"{path}: the lock and the overlay disagree on who changes it")
            elif source and {source.sha256} != set(entry.after.values()):
                lines.append(f"overlay file {path} differs from the lock")
        if lines:
            raise OverlayError(FAILED, *(f"{line}: run `make lock`" for line in lines))


def _overlay_files(root: Path) -> dict[str, Source]:
    """Overlay files by their path in a checkout; a symlink among them is refused."""
    found = {}
    for ours, theirs in OVERLAY_ROOTS.items():
        for folder, subfolders, files in os.walk(root / ours):
            subfolders[:] = sorted(name for name in subfolders if name != "__pycache__")
            for name in [*subfolders, *sorted(files)]:
                path = Path(folder, name)
                if path.is_symlink():
                    raise OverlayError(
                        FAILED, f"{path.relative_to(root)} is a symlink: overlay files are real"
                    )
                if name in subfolders or path.suffix == ".pyc":
                    continue
                relative = Path(theirs, path.relative_to(root / ours)).as_posix()
                check_relative(relative, ours)
                executable = os.access(path, os.X_OK)
                found[relative] = Source(path, sha256(path.read_bytes()), executable)
    return found
