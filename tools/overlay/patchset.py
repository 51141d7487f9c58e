# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The patch set on our side: the lock, the series of patches, and the overlay files."""

import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from overlay.checkout import check_relative, sha256
from overlay.errors import FAILED, OverlayError

# Folder of ours -> where it lands in a checkout.
OVERLAY_ROOTS = {"megatron_overlay": "", "examples/mimo": "examples/mimo"}
BY_OVERLAY = "overlay"
PATCH_NAME = re.compile(r"\d{4}-[a-z0-9-]+\.patch")
_LOCK_HEADER = """\
# The pin, and what the patch set does to it. `make lock` writes the tables [patches] and [files];
# a new pin is put into the first five lines by hand.
"""


@dataclass(frozen=True)
class LockedFile:
    """An upstream file that we change: sha256 before and after, and which patches do it
    (``["overlay"]`` for a file that is replaced whole)."""

    before: str
    after: str
    by: tuple[str, ...]


@dataclass
class Lock:
    """``patches/upstream.toml``."""

    version: str
    tag: str
    commit: str
    sdist: str
    sdist_sha256: str
    patches: dict[str, str] = field(default_factory=dict)
    files: dict[str, LockedFile] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Lock":
        try:
            table = tomllib.loads(path.read_text())
            for name, entry in table.get("files", {}).items():
                check_relative(name, path.name)
                table["files"][name] = LockedFile(
                    entry["before"], entry["after"], tuple(entry["by"])
                )
            return cls(**table)
        except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
            raise OverlayError(FAILED, f"{path}: no usable lock: {error}") from None

    def text(self) -> str:
        lines = [
            f'{name} = "{getattr(self, name)}"'
            for name in ("version", "tag", "commit", "sdist", "sdist_sha256")
        ]
        lines += ["", "[patches]"]
        lines += [f'"{name}" = "{digest}"' for name, digest in self.patches.items()]
        for path, entry in sorted(self.files.items()):
            by = ", ".join(f'"{name}"' for name in entry.by)
            lines += ["", f'[files."{path}"]', f'before = "{entry.before}"']
            lines += [f'after = "{entry.after}"', f"by = [{by}]"]
        return _LOCK_HEADER + "\n".join(lines) + "\n"


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

    def series(self) -> list[str]:
        """Names of the patches, in the order in which they apply."""
        names = (self.patch_dir / "series").read_text().split()
        for name in names:
            if not PATCH_NAME.fullmatch(name):
                raise OverlayError(
                    FAILED, f"patches/series: {name!r} is not named NNNN-topic.patch"
                )
        return names

    def patch(self, name: str) -> bytes:
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
        if series != list(self.lock.patches):
            lines.append("patches/series lists other patches than the lock does")
        for name in series:
            if sha256(self.patch(name)) != self.lock.patches.get(name):
                lines.append(f"patches/{name} differs from the lock")
        for path, entry in self.lock.files.items():
            source = self.overlay.get(path)
            if (entry.by == (BY_OVERLAY,)) != (source is not None):
                lines.append(f"{path}: the lock and the overlay disagree on who changes it")
            elif source and source.sha256 != entry.after:
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
