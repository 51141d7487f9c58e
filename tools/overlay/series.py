# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The series of patches, each as the files that it changes, before and after."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from overlay import git
from overlay.checkout import check_relative
from overlay.errors import FAILED, OverlayError

Original = Callable[[str], bytes | None]  # returns upstream's file at a path, or None


@dataclass
class Step:
    """One patch: its header, and each file that it changes, before and after it."""

    name: str
    header: bytes
    files: dict[str, tuple[bytes, bytes]]

    def text(self) -> bytes:
        """Return the patch in its canonical form; empty if it changes nothing."""
        before, after = ({p: sides[i] for p, sides in self.files.items()} for i in (0, 1))
        lines = [line.rstrip() for line in self.header.strip().splitlines()]
        diff = git.diff(before, after)
        return diff and b"\n".join(lines) + b"\n\n" + diff


def split(patch: bytes) -> tuple[bytes, bytes]:
    """Split a patch file into header and diff; either may be empty."""
    header, start, diff = (b"\n" + patch).partition(b"\ndiff --git ")
    return header[1:] + b"\n" * bool(start), start[1:] + diff


def build(patches: dict[str, bytes], original: Original, scratch: Path | None = None) -> list[Step]:
    """Apply the patches in order to upstream's files.

    Raises:
        OverlayError: a patch does not apply, or touches a file that upstream does not have.
    """
    steps, tree = [], {}
    for name, patch in patches.items():
        header, diff = split(patch)
        before = {}
        for path in git.touched(f"patches/{name}", diff):
            check_relative(path, f"patches/{name}")
            before[path] = tree.get(path, original(path))
            if before[path] is None:
                raise OverlayError(FAILED, f"patches/{name}: upstream has no {path}")
        after = git.apply(f"patches/{name}", diff, before, scratch)[0] if diff else {}
        tree |= after
        steps.append(Step(name, header, {path: (before[path], after[path]) for path in before}))
    return steps


def last_tree(steps: Iterable[Step]) -> dict[str, bytes]:
    """Return all patched files after the last patch."""
    return {path: after for step in steps for path, (_, after) in step.files.items()}


def merge(step: Step, original: Original) -> tuple[Step, list[str]]:
    """Port a patch to other files by three-way merges.

    Conflicting changes are left out. Also return the paths in which there are any.
    """
    files, conflicts = {}, []
    for path, sides in step.files.items():
        if (ours := original(path)) is None:
            conflicts.append(path)
            continue
        merged, clean = git.merge(ours, *sides)
        if not clean:
            conflicts.append(path)
            merged, _ = git.merge(ours, *sides, "--ours")
        if merged != ours:
            files[path] = ours, merged
    return Step(step.name, step.header, files), conflicts


def port(steps: list[Step], original: Original) -> tuple[list[Step], dict[str, list[int]]]:
    """Port all patches to other originals.

    Also return the indices of the steps that conflict in each file.
    """
    ported, conflicts, tree = [], defaultdict(list), {}

    def present(path: str) -> bytes | None:
        return tree.get(path, original(path))

    for index, step in enumerate(steps):
        one, paths = merge(step, present)
        for path in paths:
            conflicts[path].append(index)
        tree.update(last_tree([one]))
        ported.append(one)
    return ported, dict(conflicts)


def carry(
    steps: list[Step], owner: int, path: str, applied: bytes, edited: bytes, original: Original
) -> None:
    """Put an edit of a fully patched file into step ``owner``, and carry it through the later
    steps.

    Raises:
        OverlayError: the edit conflicts with a later patch.
    """
    before = last_tree(steps[:owner]).get(path, original(path))
    for step in steps[owner:]:
        if path in step.files or step is steps[owner]:
            _, after = step.files.get(path, (before, before))
            merged, clean = git.merge(after, applied, edited)
            if not clean:
                what = f"{path}: the edit meets lines of patches after {step.name}"
                raise OverlayError(FAILED, what)
            step.files[path] = before, merged
            before = merged
