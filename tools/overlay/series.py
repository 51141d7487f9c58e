# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The series of patches, each as the files that it changes, before and after."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from overlay import git
from overlay.checkout import check_relative
from overlay.errors import FAILED, OverlayError

Original = Callable[[str], bytes | None]  # returns upstream's file at a path, or None


@dataclass
class Step:
    """One patch, ``header`` and ``diff``, and each file that it changes, before and after it.

    If it is left out, because upstream's files are not at hand, ``files`` is empty.
    """

    name: str
    header: bytes
    diff: bytes
    files: dict[str, tuple[bytes, bytes]]
    left_out: bool = False

    def text(self) -> bytes:
        """Return the patch in its canonical form; empty if it changes nothing."""
        if self.left_out:
            return self.header + self.diff
        before, after = ({p: sides[i] for p, sides in self.files.items()} for i in (0, 1))
        lines = [line.rstrip() for line in self.header.strip().splitlines()]
        diff = git.diff(before, after)
        return diff and b"\n".join(lines) + b"\n\n" + diff


def split(patch: bytes) -> tuple[bytes, bytes]:
    """Split a patch file into header and diff; either may be empty."""
    header, start, diff = (b"\n" + patch).partition(b"\ndiff --git ")
    return header[1:] + b"\n" * bool(start), start[1:] + diff


def build(
    patches: dict[str, bytes], original: Original, optional: Collection[str] = ()
) -> list[Step]:
    """Apply the patches in order to upstream's files.

    Leave out the patches of ``optional`` paths that are not at hand, and those that follow upon
    them.

    Raises:
        OverlayError: a patch does not apply, or touches a file that upstream does not have.
    """
    steps, tree, lost = [], {}, set()
    for name, patch in patches.items():
        header, diff = split(patch)
        paths = [check_relative(path, f"patches/{name}") for path in git.paths_of(diff)]
        before = {path: tree.get(path, original(path)) for path in paths}
        missing = {path for path, data in before.items() if data is None or path in lost}
        if not_there := missing.difference(optional):
            raise OverlayError(FAILED, f"patches/{name}: upstream has no {min(not_there)}")
        if missing:
            lost.update(paths)
            steps.append(Step(name, header, diff, {}, left_out=True))
            continue
        after = git.apply(f"patches/{name}", diff, before)[0] if diff else {}
        tree |= after
        sides = {path: (data, after[path]) for path, data in before.items()}
        steps.append(Step(name, header, diff, sides))
    return steps


def last_tree(steps: Iterable[Step]) -> dict[str, bytes]:
    """Return all patched files after the last patch."""
    return {path: after for step in steps for path, (_, after) in step.files.items()}


def originals(steps: list[Step]) -> dict[str, bytes]:
    """Return all patched files before the first patch."""
    return {path: sides[0] for step in reversed(steps) for path, sides in step.files.items()}


def port(steps: Iterable[Step], original: Original) -> list[tuple[Step, str, list[str]]]:
    """Carry the patches to other files: apply each, or else merge it three ways.

    Changes that conflict are left out. Return each patch, how it got there, and the files in which
    it conflicts.
    """
    ported, tree = [], {}
    for step in steps:
        paths = git.paths_of(step.diff)
        ours = {path: tree.get(path, original(path)) for path in paths}
        there = {path: data for path, data in ours.items() if data is not None}
        conflicts = [path for path in paths if path not in there]
        try:
            after, moved = git.apply(step.name, step.diff, there)
            state = "applies with offset" if moved else "applies"
        except OverlayError:
            after = {}
            for path, data in ({} if step.left_out else there).items():
                sides = data, *step.files[path]
                after[path], clean = git.merge(*sides)
                if not clean:
                    conflicts.append(path)
                    after[path], _ = git.merge(*sides, "--ours")
            conflicts = paths if step.left_out else conflicts
            state = "conflicts" if conflicts else "merges" if after != there else "already there"
            state = "left out" if step.left_out and not there else state
        files = {path: (ours[path], data) for path, data in after.items() if data != ours[path]}
        tree |= after
        ported.append((replace(step, files=files), state, conflicts))
    return ported


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
