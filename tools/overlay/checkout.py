# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Files of a checkout, seen without following symlinks, and never anything outside it.

What stands at a path is its state, a text: ``MODE SHA256`` of a regular file, ``link TARGET`` of a
symlink, ``other`` of what this tool never makes or replaces, such as a folder. Absence is ``None``.
"""

import hashlib
import os
import stat
from pathlib import Path, PurePosixPath

from overlay.errors import DIFFERS_FROM_LOCK, FAILED, NOT_THE_PIN, OverlayError

STATE_DIR = ".mimo-overlay"
_FORBIDDEN_PARTS = {"..", ".", "", ".git", STATE_DIR}
_VERSION_FIELDS = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest(state: str | None) -> str | None:
    """The sha256 of a regular file's state."""
    kind, _, content = (state or "").partition(" ")
    return content if kind not in ("", "link", "other") else None


def same(state: str | None, *others: str | None) -> bool:
    """``state`` has the content of one of ``others``. The mode is kept for restoring, not compared:
    whoever changes it has edited nothing."""
    return any(state == other or (digest(state) or "") == digest(other) for other in others)


def regular(before: str | None, sha: str, executable: bool = False) -> str:
    """The state of a regular file that takes the place of ``before``, and its mode."""
    mode = before.partition(" ")[0] if digest(before) else "755" if executable else "644"
    return f"{mode} {sha}"


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

    def look(self, relative: str) -> str | None:
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
            return f"link {os.readlink(path)}"
        if not stat.S_ISREG(mode):
            return "other"
        return f"{stat.S_IMODE(mode):o} {sha256(path.read_bytes())}"


def read_version(package_info: str) -> str:
    """Version that upstream's ``package_info.py`` states, read as text: nothing is imported."""
    fields = dict.fromkeys(_VERSION_FIELDS, "")
    for line in package_info.splitlines():
        name, equals, value = line.partition(" = ")
        if equals and name in fields:
            fields[name] = value.strip().strip("'\"")
    *numbers, suffix = fields.values()
    return ".".join(numbers) + suffix if all(numbers) else "of an unknown version"
