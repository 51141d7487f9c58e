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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from overlay.checkout import check_relative, sha256
from overlay.errors import FAILED, NOT_THE_PIN, OverlayError

# Folder in our repository -> its place in a checkout.
OVERLAY_ROOTS = {"megatron_overlay": "", "examples/mimo": "examples/mimo"}
BY_OVERLAY = "overlay"
_PATCH_NAME = re.compile(r"\d{4}-[a-z0-9-]+\.patch")
_TOP = """\
# The versions of upstream that the patch set takes, and what it does to them. `pin` and [versions]
# are written by hand (docs/contributor/moving-the-pin.md), `locked`, [patches] and [files] by
# `make lock`.
"""


@dataclass(frozen=True)
class Version:
    """A release of upstream. If ``commit`` is empty, a clone is checked file by file."""

    tag: str
    sdist: str
    sdist_sha256: str
    commit: str = ""


@dataclass(frozen=True)
class LockedFile:
    """An upstream file that we change.

    by: the patches that change it, or ``("overlay",)`` if an overlay file replaces it. before,
    after: its sha256 in each version that has it. git_only: no sdist has it, and its patches are
    left out where it is not as locked.
    """

    by: tuple[str, ...]
    before: dict[str, str]
    after: dict[str, str]
    git_only: bool = False


@dataclass
class Lock:
    """The lock's content.

    ``pin`` is the version that the patches are written for. They apply to all ``locked`` versions:
    those of ``versions`` that ``files`` was made for.
    """

    pin: str
    versions: dict[str, Version]
    locked: list[str] = field(default_factory=list)
    patches: dict[str, str] = field(default_factory=dict)
    files: dict[str, LockedFile] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Lock":
        try:
            table = tomllib.loads(path.read_text())
            table["versions"] = {name: Version(**v) for name, v in table["versions"].items()}
            for name, entry in table.setdefault("files", {}).items():
                check_relative(name, path.name)
                sides = {
                    side: dict.fromkeys(table["locked"], value) if isinstance(value, str) else value
                    for side, value in entry.items()
                    if side in ("before", "after")
                }
                table["files"][name] = LockedFile(**entry | sides | {"by": tuple(entry["by"])})
            lock = cls(**table)
            lock.versions[lock.pin]  # noqa: B018
            return lock
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OverlayError(FAILED, f"{path}: no usable lock: {error!r}") from None

    def text(self) -> str:
        lines = [f'pin = "{self.pin}"', f"locked = {json.dumps(self.locked)}"]
        for name, version in self.versions.items():
            lines += ["", f'[versions."{name}"]']
            lines += [f'{key} = "{value}"' for key, value in asdict(version).items() if value]
        lines += ["", "[patches]"]
        lines += [f'"{name}" = "{digest}"' for name, digest in self.patches.items()]
        for path, entry in sorted(self.files.items()):
            lines += ["", f'[files."{path}"]', f"by = {json.dumps(entry.by)}"]
            for name, side in (("before", entry.before), ("after", entry.after)):
                if len(side) == len(self.locked) and len(set(side.values())) == 1:
                    lines.append(f'{name} = "{side[self.pin]}"')
                else:
                    lines += [f'{name}."{version}" = "{sha}"' for version, sha in side.items()]
            lines += ["git_only = true"] * entry.git_only
        return _TOP + "\n".join(lines) + "\n"

    def changed_in(self, version: str) -> dict[str, tuple[str, str]]:
        """Return the sha256 before and after of each changed file of ``version``, by path."""
        return {
            path: (entry.before[version], entry.after[version])
            for path, entry in self.files.items()
            if version in entry.before
        }

    def git_only(self) -> dict[str, LockedFile]:
        """Return the files that only git checkouts have, by path. Their patches touch no others."""
        return {path: entry for path, entry in self.files.items() if entry.git_only}

    def git_only_patches(self) -> set[str]:
        return {name for entry in self.git_only().values() for name in entry.by}

    def without_git_only(self) -> "Lock":
        names = self.git_only_patches()
        files = {path: entry for path, entry in self.files.items() if not entry.git_only}
        patches = {name: sha for name, sha in self.patches.items() if name not in names}
        return replace(self, files=files, patches=patches)

    def is_patched(self, path: str) -> bool:
        return path in self.files and self.files[path].by != (BY_OVERLAY,)


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
            ours = {sha256(self.overlay[path].read_bytes())} if path in self.overlay else set()
            if ours != (set(entry.after.values()) if entry.by == (BY_OVERLAY,) else set()):
                stale.append(f"overlay file {path}")
        if stale:
            lines = [f"{one} differs from the lock: run `make lock`" for one in stale]
            raise OverlayError(FAILED, *lines)


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
