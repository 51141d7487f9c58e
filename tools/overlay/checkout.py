# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Files of a checkout, read without following symlinks, and nothing outside it.

The state of a path is a text: ``MODE SHA256`` for a regular file, ``link TARGET`` for a symlink,
``other`` for what this tool never makes or replaces, such as a folder. If nothing is there, it is
``None``.
"""

import hashlib
import os
import re
import stat
from pathlib import Path, PurePosixPath

from overlay.errors import DIFFERS_FROM_LOCK, FAILED, NOT_THE_PIN, OverlayError

STATE_DIR = ".mimo-overlay"
_FORBIDDEN_PARTS = {"..", ".", "", ".git", STATE_DIR}
_VERSION_FIELD = re.compile(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?(\w*)", re.MULTILINE)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest(state: str | None) -> str | None:
    """Return the sha256 from a regular file's state; None for other states."""
    kind, _, content = (state or "").partition(" ")
    return content if kind not in ("", "link", "other") else None


def same(state: str | None, *others: str | None) -> bool:
    """Return whether ``state`` has the content of one of ``others``.

    The mode, which is kept for restoring, is not compared: changing it is no edit.
    """
    return any(state == other or (digest(state) or "") == digest(other) for other in others)


def check_relative(path: str, where: str) -> str:
    """Return ``path`` if it is a plain relative path inside a checkout, else raise OverlayError.

    The private folders of git and of this tool are refused, too. ``where`` names the origin of the
    path in the error.
    """
    if path.startswith("/") or _FORBIDDEN_PARTS & set(path.split("/")) or "\0" in path:
        raise OverlayError(FAILED, f"{where}: refused path {path!r}: it leaves the checkout")
    return path


def parents(path: str) -> list[str]:
    """Return the folders above a relative path, outermost first, without the checkout itself."""
    return [str(folder) for folder in reversed(PurePosixPath(path).parents)][1:]


class Checkout:
    """A Megatron-LM tree. ``root`` is resolved once; below it no symlink is ever followed.

    Raises:
        OverlayError: ``root`` is not a Megatron-LM checkout.
    """

    def __init__(self, root: Path):
        self.root = Path(os.path.realpath(root))
        info = self.root / "megatron/core/package_info.py"
        if not info.is_file():
            what = f"{root} is not a Megatron-LM checkout: it has no {info.name}"
            raise OverlayError(NOT_THE_PIN, what)
        fields = dict(_VERSION_FIELD.findall(info.read_text(errors="replace")))
        numbers = [fields.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
        self.version = "of an unknown version"
        if all(numbers):
            self.version = ".".join(numbers) + fields.get("PRE_RELEASE", "")

    def path(self, relative: str) -> Path:
        return self.root / check_relative(relative, "checkout")

    def read(self, relative: str) -> bytes | None:
        """Return a regular file's content; None if there is no such file."""
        return self.path(relative).read_bytes() if digest(self.look(relative)) else None

    def look(self, relative: str) -> str | None:
        """Return the state of a path.

        Raises:
            OverlayError: a folder on the way is a symlink or a file.
        """
        path = self.path(relative)
        try:
            for folder in parents(relative):
                mode = os.lstat(self.root / folder).st_mode
                if not stat.S_ISDIR(mode):
                    kind = "a symlink" if stat.S_ISLNK(mode) else "not a folder"
                    what = f"{folder} is {kind}: refused to go through it"
                    raise OverlayError(DIFFERS_FROM_LOCK, what)
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(mode):
            return f"link {os.readlink(path)}"
        if not stat.S_ISREG(mode):
            return "other"
        return f"{stat.S_IMODE(mode):o} {sha256(path.read_bytes())}"
