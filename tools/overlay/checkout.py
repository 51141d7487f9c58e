# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Files of a checkout, read without following symlinks, and nothing outside it."""

import hashlib
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import DIFFERS_FROM_LOCK, FAILED, LOCAL_EDITS, NOT_THE_PIN, OverlayError

STATE_DIR = ".mimo-overlay"
LINK = "link"
_FORBIDDEN_PARTS = {"..", ".", "", ".git", STATE_DIR}
_VERSION_FIELD = re.compile(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?(\w*)", re.MULTILINE)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Entry:
    """A file or a symlink at a path.

    mode: octal permissions of a regular file; ``link`` for a symlink, whose ``data`` is its target.
    """

    data: bytes
    mode: str = "644"


def state(entry: Entry | None) -> str | None:
    """Return a text that tells entries apart; to change permissions is no edit."""
    if entry is None:
        return None
    return f"link {os.fsdecode(entry.data)}" if entry.mode == LINK else sha256(entry.data)


def check_relative(path: str, where: str) -> str:
    """Return ``path`` if it is a plain relative path inside a checkout, else raise OverlayError.

    The private folders of git and of this tool are refused, too. ``where`` names the origin of the
    path in the error.
    """
    if path.startswith("/") or _FORBIDDEN_PARTS & set(path.split("/")) or "\0" in path:
        raise OverlayError(FAILED, f"{where}: refused path {path!r}: it leaves the checkout")
    return path


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
        numbers = [fields.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH")]
        self.version = ".".join(numbers) + fields.get("PRE_RELEASE", "")

    def check_version(self, wanted: Iterable[str]) -> None:
        if self.version not in wanted:
            needs = f"this overlay needs {' or '.join(wanted)}"
            raise OverlayError(NOT_THE_PIN, f"{self.root} is Megatron-LM {self.version}; {needs}")

    def read(self, relative: str) -> bytes | None:
        """Return a regular file's content; None if there is no such file."""
        entry = self.look(relative)
        return entry.data if entry and entry.mode != LINK else None

    def look(self, relative: str) -> Entry | None:
        """Return what lies at a path, None if nothing does.

        Raises:
            OverlayError: a folder on the way is a symlink, or a folder lies there.
            OSError: a file lies where a folder should.
        """
        path = self.root / check_relative(relative, "checkout")
        if path.parent.resolve() != path.parent:
            what = f"{relative} lies behind a symlink: refused to go through it"
            raise OverlayError(DIFFERS_FROM_LOCK, what)
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(mode):
            return Entry(os.fsencode(os.readlink(path)), LINK)
        if not stat.S_ISREG(mode):
            raise OverlayError(LOCAL_EDITS, f"{relative} exists, and is not a file")
        return Entry(path.read_bytes(), f"{stat.S_IMODE(mode):o}")
