# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The lock, ``patches/upstream.toml``: upstream's versions, and the patch set's changes to each."""

import json
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from overlay.checkout import check_relative
from overlay.errors import FAILED, NOT_THE_PIN, OverlayError

BY_OVERLAY = "overlay"
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
            files = table.setdefault("files", {})
            for name, entry in files.items():
                check_relative(name, path.name)
                sides = (_spread(entry[side], table["locked"]) for side in ("before", "after"))
                files[name] = LockedFile(tuple(entry["by"]), *sides, entry.get("git_only", False))
            lock = cls(**table)
            lock.versions[lock.pin]  # noqa: B018
            return lock
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OverlayError(FAILED, f"{path}: no usable lock: {error!r}") from None

    def text(self) -> str:
        lines = [f'pin = "{self.pin}"', f"locked = {_listed(self.locked)}"]
        for name, version in self.versions.items():
            lines += ["", f'[versions."{name}"]']
            lines += [f'{key} = "{value}"' for key, value in asdict(version).items() if value]
        lines += ["", "[patches]"]
        lines += [f'"{name}" = "{digest}"' for name, digest in self.patches.items()]
        for path, entry in sorted(self.files.items()):
            lines += ["", f'[files."{path}"]', f"by = {_listed(entry.by)}"]
            lines += self._side("before", entry.before) + self._side("after", entry.after)
            lines += ["git_only = true"] * entry.git_only
        return _TOP + "\n".join(lines) + "\n"

    def _side(self, name: str, digests: dict[str, str]) -> list[str]:
        """Return one line if all versions agree, else one for each."""
        if len(digests) == len(self.locked) and len(set(digests.values())) == 1:
            return [f'{name} = "{digests[self.pin]}"']
        return [f'{name}."{version}" = "{digest}"' for version, digest in digests.items()]

    def changed_in(self, version: str) -> dict[str, tuple[str, str]]:
        """Return the sha256 before and after of each changed file of ``version``, by path."""
        return {
            path: (entry.before[version], entry.after[version])
            for path, entry in self.files.items()
            if version in entry.before
        }

    def git_only(self) -> dict[str, LockedFile]:
        """Return the files that only git checkouts have, by path."""
        return {path: entry for path, entry in self.files.items() if entry.git_only}

    def git_only_patches(self) -> set[str]:
        """Return the patches of git-only files, which touch no others."""
        return {name for entry in self.git_only().values() for name in entry.by}

    def is_patched(self, path: str) -> bool:
        return path in self.files and self.files[path].by != (BY_OVERLAY,)


def check_version(where: Path, found: str, wanted: Iterable[str]) -> None:
    if found not in wanted:
        versions = " or ".join(wanted)
        raise OverlayError(
            NOT_THE_PIN, f"{where} is Megatron-LM {found}; this overlay needs {versions}"
        )


def _spread(value: str | dict[str, str], versions: list[str]) -> dict[str, str]:
    return dict.fromkeys(versions, value) if isinstance(value, str) else value


def _listed(names: Iterable[str]) -> str:
    return json.dumps(list(names))
