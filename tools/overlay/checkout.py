# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Files of a checkout, seen without following symlinks, and never anything outside it."""

import hashlib
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from overlay.errors import DIFFERS_FROM_LOCK, FAILED, NOT_THE_PIN, OverlayError

STATE_DIR = ".mimo-overlay"
_FORBIDDEN_PARTS = {"..", ".", "", ".git", STATE_DIR}
_VERSION_FIELDS = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class FileState:
    """What stands at a path: a regular file (``sha256``), a symlink (``link``), or, with neither,
    something that this tool never makes or replaces, such as a folder. Absence is ``None``."""

    sha256: str | None = None
    link: str | None = None
    mode: int = 0o644

    def same(self, other: "FileState | None") -> bool:
        """Equal content; the mode bits are kept for restoring, they are not compared."""
        return other is not None and (self.sha256, self.link) == (other.sha256, other.link)

    def to_json(self) -> dict:
        return {name: value for name, value in asdict(self).items() if value is not None}


def same(a: FileState | None, *others: FileState | None) -> bool:
    """``a`` has the content of one of ``others``."""
    return any(b is None if a is None else a.same(b) for b in others)


def check_relative(path: str, where: str) -> str:
    """Return ``path`` if it is a plain relative path that stays inside a checkout and out of the
    private folders of git and of this tool. ``where`` says who asks for it."""
    if path.startswith("/") or _FORBIDDEN_PARTS & set(path.split("/")) or "\0" in path:
        raise OverlayError(FAILED, f"{where}: refused path {path!r}: it leaves the checkout")
    return path


def parents(path: str) -> list[str]:
    """Folders above a relative path, outermost first, without the checkout itself."""
    return [str(folder) for folder in reversed(PurePosixPath(path).parents)][1:]


class Checkout:
    """A Megatron-LM tree. ``root`` is resolved once; below it no symlink is ever followed.

    Raises:
        OverlayError: ``root`` is no Megatron-LM checkout.
    """

    def __init__(self, root: Path):
        self.root = Path(os.path.realpath(root))
        info = self.root / "megatron/core/package_info.py"
        if not info.is_file():
            raise OverlayError(
                NOT_THE_PIN, f"{root} is not a Megatron-LM checkout: it has no {info.name}"
            )
        self.version = read_version(info.read_text(errors="replace"))

    def path(self, relative: str) -> Path:
        return self.root / check_relative(relative, "checkout")

    def read(self, relative: str) -> bytes:
        return self.path(relative).read_bytes()

    def look(self, relative: str) -> FileState | None:
        """The state of a path.

        Raises:
            OverlayError: a folder on the way is a symlink or a file.
        """
        path = self.path(relative)
        for folder in parents(relative):
            try:
                mode = os.lstat(self.root / folder).st_mode
            except FileNotFoundError:
                return None
            if not stat.S_ISDIR(mode):
                kind = "a symlink" if stat.S_ISLNK(mode) else "not a folder"
                raise OverlayError(
                    DIFFERS_FROM_LOCK, f"{folder} is {kind}: refused to go through it"
                )
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(mode):
            return FileState(link=os.readlink(path))
        if not stat.S_ISREG(mode):
            return FileState()
        return FileState(sha256=sha256(path.read_bytes()), mode=stat.S_IMODE(mode))


def read_version(package_info: str) -> str:
    """Version that upstream's ``package_info.py`` states, read as text: nothing is imported."""
    fields = dict.fromkeys(_VERSION_FIELDS, "")
    for line in package_info.splitlines():
        name, equals, value = line.partition(" = ")
        if equals and name in fields:
            fields[name] = value.strip().strip("'\"")
    *numbers, suffix = fields.values()
    return ".".join(numbers) + suffix if all(numbers) else "of an unknown version"
