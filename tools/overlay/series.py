# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The series of patches, each as the files that it changes, before and after."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from overlay import git
from overlay.checkout import check_relative
from overlay.errors import OverlayError
from overlay.git import Files

Original = Callable[[str], bytes | None]  # returns upstream's file at a path, or None


@dataclass
class Patched:
    """One patch, ``header`` and ``diff``, and the files that it changes, before and after it.

    A patch is left out where the tree lacks its files. problem: why it does not apply, in a line.
    """

    name: str
    header: bytes
    diff: bytes
    before: Files
    after: Files = field(default_factory=dict)
    left_out: bool = False
    problem: str = ""

    def text(self) -> bytes:
        """Return the patch in its canonical form; the header alone if it changes nothing."""
        lines = [line.rstrip() for line in self.header.strip().splitlines()]
        diff = self.diff if self.left_out else git.diff(self.before, self.after)
        return b"\n".join(lines) + b"\n\n" + diff


def is_git_only(path: str) -> bool:
    """Return whether git checkouts have a path and sdists, which are the package alone, lack it."""
    return not path.startswith("megatron/")


def split(patch: bytes) -> tuple[bytes, bytes]:
    """Split a patch file into header and diff; either may be empty."""
    header, start, diff = (b"\n" + patch).partition(b"\ndiff --git ")
    return header[1:] + b"\n" * bool(start), start[1:] + diff


def build(patches: Files, original: Original) -> list[Patched]:
    """Apply the patches in order to upstream's files; leave out a patch with a problem, and a patch
    of absent git-only files."""
    patched, tree = [], {}
    for name, patch in patches.items():
        header, diff = split(patch)
        paths = [check_relative(path, f"patches/{name}") for path in git.paths_of(diff)]
        found = {path: tree.get(path, original(path)) for path in paths}
        there = {path: data for path, data in found.items() if data is not None}
        one = Patched(name, header, diff, there)
        one.left_out = len(there) < len(paths) and all(map(is_git_only, paths))
        if diff and not one.left_out:
            try:
                one.after = git.apply(f"patches/{name}", diff, there)
            except OverlayError as error:
                one.problem = error.lines[0]
        tree |= one.after
        patched.append(one)
    return patched


def last_tree(patched: Iterable[Patched]) -> Files:
    """Return all patched files after the last patch."""
    return {path: after for one in patched for path, after in one.after.items()}
