# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The patch set in our repository: overlay files, patches, and the lock ``patches/upstream.toml``.

The lock has upstream's versions, and the patch set's changes to each.
"""

import json
import os
import re
import tomllib
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from overlay.checkout import check_relative
from overlay.errors import FAILED, OverlayError
from overlay.git import Files

# Folder in our repository -> its place in a checkout.
OVERLAY_ROOTS = {"megatron_overlay": "", "examples/mimo": "examples/mimo"}
NEXT = "next/"  # folder of the patches that the next version has instead
_PATCH_NAME = re.compile(r"\d{4}-[a-z0-9-]+\.patch")
_TOP = """\
# The versions of upstream that the patch set takes, and what it does to them. `pin` and [versions]
# are written by hand (docs/contributor/moving-the-pin.md), all else by `make lock`: the sha256 of
# each file that patches or the overlay change, before and after, in a table for all versions in
# which these are the same. A version without an sdist is a commit of main, with patches of its own
# in next/.
"""
Sides = list[str]  # the sha256 of a file before and after
Version = dict[str, str]  # of a release: tag, sdist, sdist_sha256, commit; of main: commit alone


@dataclass
class Lock:
    """The lock's content.

    ``pin`` is the version that the patches are written for. They apply to all versions in
    ``files``, by path; only git checkouts have those that do not begin with ``megatron/``.
    """

    pin: str
    versions: dict[str, Version]
    files: dict[str, dict[str, Sides]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Lock":
        try:
            lock = cls(**tomllib.loads(path.read_text()))
            tables = lock.files.items()
            lock.files = {name: table for names, table in tables for name in names.split()}
            for table in lock.files.values():
                for name, sides in table.items():
                    check_relative(name, path.name)
                    _, _ = sides
            lock.versions[lock.pin]  # noqa: B018
            return lock
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OverlayError(FAILED, f"{path}: no usable lock: {error!r}") from None

    @property
    def next(self) -> str | None:
        """Return the version that is a commit of main; None if there is none."""
        return next((name for name, one in self.versions.items() if "sdist" not in one), None)

    def text(self) -> str:
        tables = {f'versions."{name}"': fields for name, fields in self.versions.items()}
        for table, same in groupby(self.files.items(), key=itemgetter(1)):
            tables[f'files."{" ".join(name for name, _ in same)}"'] = table
        lines = [f'pin = "{self.pin}"']
        for title, table in tables.items():
            lines += ["", f"[{title}]"]
            for key, value in table.items():
                name = key if key.isidentifier() else f'"{key}"'
                lines.append(f"{name} = {json.dumps(value)}")
        return _TOP + "\n".join(lines) + "\n"


class PatchSet:
    """The patch set, read from the repository at ``root``."""

    def __init__(self, root: Path):
        self.root = Path(os.path.realpath(root))
        self.folder = self.root / "patches"
        self.lock = Lock.read(self.folder / "upstream.toml")
        self.overlay = _overlay_files(self.root)
        self.texts = self._patches("") | self._patches(NEXT)

    def series(self, version: str | None = None) -> Files:
        """Return a version's patches by name, in the order of their numbers, in which they apply.

        Without a version, they are those of the releases.
        """
        chosen = {name: name for name in self.texts if not name.startswith(NEXT)}
        if version and version == self.lock.next:
            chosen |= {n.removeprefix(NEXT): n for n in self.texts if n.startswith(NEXT)}
        return {name: self.texts[name] for _, name in sorted(chosen.items())}

    def sources(self, *beside: str) -> dict[str, Path]:
        """Return the overlay's Python files by their path in a checkout, and those of other folders
        by their path here."""
        found = {path: ours for path, ours in self.overlay.items() if ours.suffix == ".py"}
        files = [file for folder in beside for file in (self.root / folder).rglob("*.py")]
        return found | {file.relative_to(self.root).as_posix(): file for file in files}

    def _patches(self, prefix: str) -> Files:
        names = sorted(path.name for path in (self.folder / prefix).glob("*.patch"))
        for name, following in zip(names, [*names[1:], "end"], strict=False):
            if not _PATCH_NAME.fullmatch(name):
                raise OverlayError(FAILED, f"patches/{name} is not named NNNN-topic.patch")
            if name[:4] == following[:4]:
                raise OverlayError(FAILED, f"patches/{name} and {following} have the same number")
        return {prefix + name: (self.folder / prefix / name).read_bytes() for name in names}


def _overlay_files(root: Path) -> dict[str, Path]:
    """Return the overlay files by their path in a checkout; refuse symlinks among them."""
    found = {}
    for ours, theirs in OVERLAY_ROOTS.items():
        for path in sorted((root / ours).rglob("*")):
            if path.is_symlink():
                what = f"{path.relative_to(root)} is a symlink: overlay files are real"
                raise OverlayError(FAILED, what)
            if path.is_file() and path.suffix != ".pyc":
                relative = Path(theirs, path.relative_to(root / ours)).as_posix()
                found[check_relative(relative, ours)] = path
    return found
