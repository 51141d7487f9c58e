# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The series of patches, each as the files that it changes, before and after."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from overlay import git
from overlay.checkout import check_relative
from overlay.errors import OverlayError
from overlay.git import Files

Original = Callable[[str], bytes | None]  # returns upstream's file at a path, or None


@dataclass
class Patched:
    """One patch, ``header`` and ``diff``, and each file that it changes, before and after it.

    A patch is left out where the tree lacks its files; it then has no ``files``.
    """

    name: str
    header: bytes
    diff: bytes
    files: dict[str, tuple[bytes, bytes]]
    left_out: bool = False

    def text(self) -> bytes:
        """Return the patch in its canonical form; the header alone if it changes nothing."""
        before, after = ({p: sides[i] for p, sides in self.files.items()} for i in (0, 1))
        lines = [line.rstrip() for line in self.header.strip().splitlines()]
        diff = self.diff if self.left_out else git.diff(before, after)
        return b"\n".join(lines) + b"\n\n" + diff


def is_git_only(path: str) -> bool:
    """Return whether git checkouts have a path and sdists, which are the package alone, lack it."""
    return not path.startswith("megatron/")


def split(patch: bytes) -> tuple[bytes, bytes]:
    """Split a patch file into header and diff; either may be empty."""
    header, start, diff = (b"\n" + patch).partition(b"\ndiff --git ")
    return header[1:] + b"\n" * bool(start), start[1:] + diff


def build(patches: Files, original: Original) -> list[Patched]:
    """Apply the patches in order to upstream's files; leave out those of absent git-only files.

    Raises:
        OverlayError: a patch does not apply.
    """
    patched, tree = [], {}
    for name, patch in patches.items():
        header, diff = split(patch)
        paths = [check_relative(path, f"patches/{name}") for path in git.paths_of(diff)]
        before = {path: tree.get(path, original(path)) for path in paths}
        there = {path: data for path, data in before.items() if data is not None}
        left_out = len(there) < len(paths) and all(map(is_git_only, paths))
        after = git.apply(f"patches/{name}", diff, there) if diff and not left_out else {}
        tree |= after
        sides = {path: (before[path], data) for path, data in after.items()}
        patched.append(Patched(name, header, diff, sides, left_out))
    return patched


def last_tree(patched: Iterable[Patched]) -> Files:
    """Return all patched files after the last patch."""
    return {path: after for one in patched for path, (_, after) in one.files.items()}


def port(patches: Files, original: Original) -> list[tuple[str, str, str, list[str]]]:
    """Apply the patches in order to other files; leave out those that conflict.

    Return the state of each, its name, why it conflicts, and its files then.
    """
    ported, tree = [], {}
    for name, patch in patches.items():
        diff = split(patch)[1]
        ours = {path: tree.get(path, original(path)) for path in git.paths_of(diff)}
        there, state, why = {p: d for p, d in ours.items() if d is not None}, "applies", ""
        if ours and not there and all(map(is_git_only, ours)):
            state = "left out"
        elif diff:
            try:
                tree |= git.apply(name, diff, there)
            except OverlayError as error:
                state, why = "conflicts", error.lines[0]
                with contextlib.suppress(OverlayError):
                    git.apply(name, diff, there, "--reverse")
                    state, why = "already there", ""
        ported.append((state, name, why, list(ours) if why else []))
    return ported
