# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The patch set in our repository: overlay files, patches, and the lock ``patches/upstream.toml``.

The lock has upstream's versions, and the patch set's changes to each.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from overlay.checkout import check_relative, sha256
from overlay.errors import DIFFERS_FROM_LOCK, FAILED, NOT_THE_PIN, OverlayError, refuse
from overlay.series import Original, Patched, build, last_tree

# Folder in our repository -> its place in a checkout.
OVERLAY_ROOTS = {"megatron_overlay": "", "examples/mimo": "examples/mimo"}
_PATCH_NAME = re.compile(r"\d{4}-[a-z0-9-]+\.patch")
NEXT = "next"  # folder of the patches that the next version has instead
_TOP = """\
# The versions of upstream that the patch set takes, and what it does to them. `pin` and [versions]
# are written by hand (docs/contributor/moving-the-pin.md), all else by `make lock`: the sha256 of
# each patch, and, before and after, of each file that it changes, in a table for all versions in
# which these are the same. Only git checkouts have the files of [git_only]. A version without an
# sdist is a commit of main, with patches of its own in next/.
"""
Sides = list[str]  # the sha256 of a file before and after


@dataclass(frozen=True)
class Version:
    """A release of upstream, or a commit of its main, which has no tag and no sdist.

    If a release's ``commit`` is empty, a clone is checked file by file. ``digest`` is that of the
    patches and overlay files with which the table of a commit's files was made.
    """

    tag: str = ""
    sdist: str = ""
    sdist_sha256: str = ""
    commit: str = ""
    digest: str = ""


@dataclass
class Lock:
    """The lock's content.

    ``pin`` is the version that the patches are written for. They apply to all versions in
    ``files``, by path; ``git_only`` has the files that no sdist has, the same in all releases.
    """

    pin: str
    versions: dict[str, Version]
    patches: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Sides]] = field(default_factory=dict)
    git_only: dict[str, Sides] = field(default_factory=dict)
    next_patches: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Lock":
        try:
            lock = cls(**tomllib.loads(path.read_text()))
            lock.versions = {name: Version(**v) for name, v in lock.versions.items()}
            of_several = lock.files.items()
            lock.files = {name: table for names, table in of_several for name in names.split()}
            for table in (*lock.files.values(), lock.git_only):
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
        return next((name for name, one in self.versions.items() if not one.sdist), None)

    def git_only_of(self, version: str) -> dict[str, Sides]:
        """Return the files that a tree of this version may lack; a commit has all of them."""
        return {} if version == self.next else self.git_only

    def text(self) -> str:
        tables = {f'versions."{name}"': asdict(v) for name, v in self.versions.items()}
        tables |= {"patches": self.patches}
        for table, same in groupby(self.files.items(), key=itemgetter(1)):
            names = " ".join(name for name, _ in same)
            tables[f'files."{names}"'] = table
        tables |= {"git_only": self.git_only}
        tables |= {"next_patches": self.next_patches} if self.next else {}
        lines = [f'pin = "{self.pin}"']
        for title, table in tables.items():
            lines += ["", f"[{title}]"]
            for key, value in table.items():
                name = key if key.isidentifier() else f'"{key}"'
                lines += [f"{name} = {json.dumps(value)}"] * bool(value)
        return _TOP + "\n".join(lines) + "\n"


def check_version(where: Path, found: str, wanted: Iterable[str]) -> None:
    if found not in wanted:
        versions = " or ".join(wanted)
        what = f"{where} is Megatron-LM {found}; this overlay needs {versions}"
        raise OverlayError(NOT_THE_PIN, what)


class PatchSet:
    """The patch set, read from the repository at ``root``."""

    def __init__(self, root: Path):
        self.root = Path(os.path.realpath(root))
        self.patch_dir = self.root / "patches"
        self.lock = Lock.read(self.patch_dir / "upstream.toml")
        self.overlay = _overlay_files(self.root)

    def series(self, version: str = "") -> dict[str, bytes]:
        """Return the patches by name, in the order of their numbers, in which they apply.

        Without a version, they are those of the releases.
        """
        patches = self._patches("")
        return with_own(patches, self.own()) if version and version == self.lock.next else patches

    def own(self) -> dict[str, bytes]:
        """Return the patches that the next version has instead, or only with a header."""
        return {f"{NEXT}/{name}": patch for name, patch in self._patches(NEXT).items()}

    def next_digest(self, patches: dict[str, bytes]) -> str:
        """Return the digest of what the next version's files are made of."""
        lock = self.lock
        replaced = lock.files.get(lock.next, {}).keys() & self.overlay.keys()
        parts = patches | {path: self.overlay[path].read_bytes() for path in replaced}
        return sha256(json.dumps({name: sha256(parts[name]) for name in sorted(parts)}).encode())

    def _patches(self, folder: str) -> dict[str, bytes]:
        names = sorted(path.name for path in (self.patch_dir / folder).glob("*.patch"))
        for name, following in zip(names, [*names[1:], "end"], strict=False):
            if not _PATCH_NAME.fullmatch(name):
                raise OverlayError(FAILED, f"patches/{name} is not named NNNN-topic.patch")
            if name[:4] == following[:4]:
                raise OverlayError(FAILED, f"patches/{name} and {following} have the same number")
        return {name: (self.patch_dir / folder / name).read_bytes() for name in names}

    def sources(self, *beside: str) -> dict[str, Path]:
        """Return the overlay's Python files by their path in a checkout, and those of other folders
        by their path here."""
        found = {path: ours for path, ours in self.overlay.items() if ours.suffix == ".py"}
        files = [file for folder in beside for file in (self.root / folder).rglob("*.py")]
        return found | {file.relative_to(self.root).as_posix(): file for file in files}

    def patched_on(self, version: str, original: Original) -> list[Patched]:
        """Return the patches on a tree of a locked version, whose files are as the lock has them.

        Leave out the patches of git-only files that are absent or changed.

        Raises:
            OverlayError: another file differs from the lock; or the patch set does, because it was
                edited after the lock was made.
        """
        git_only, wrong = self.lock.git_only_of(version), []
        locked = self.lock.files[version] | git_only
        found = {path: original(path) for path in locked}
        found = {p: None if data is None else sha256(data) for p, data in found.items()}
        for path, (before, after) in locked.items():
            if found[path] == after:
                what = "is patched already, but its original is lost: restore it or fetch anew"
                wrong.append(f"{path} {what}")
            elif found[path] != before and path not in git_only:
                what = "differs from the lock, as git diff shows" if found[path] else "is missing"
                wrong.append(f"{path} {what}: restore it or fetch anew")
        refuse(DIFFERS_FROM_LOCK, wrong)
        lost = {path for path, (before, _) in git_only.items() if found[path] != before}
        patches = self.series(version)
        patched = build(patches, lambda path: None if path in lost else original(path), git_only)

        made = last_tree(patched)
        lost = git_only.keys() - made
        made |= {path: ours.read_bytes() for path, ours in self.overlay.items() if path in locked}
        made |= {f"patches/{name}": patch for name, patch in patches.items()}
        made = {name: sha256(data) for name, data in made.items()}
        wanted = {path: after for path, (_, after) in locked.items() if path not in lost}
        own = self.lock.next_patches if version == self.lock.next else {}
        wanted |= {f"patches/{name}": sha for name, sha in with_own(self.lock.patches, own).items()}
        stale = sorted(name for name in made.keys() | wanted if made.get(name) != wanted.get(name))
        refuse(FAILED, [f"{name} differs from the lock: run `make lock`" for name in stale])
        return patched


def with_own(patches: dict, own: dict) -> dict:
    """Return a series with the next version's own patches in place of those of the same name."""
    kept = {name: one for name, one in patches.items() if f"{NEXT}/{name}" not in own}
    return dict(sorted((kept | own).items(), key=lambda item: item[0].rpartition("/")[2]))


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
