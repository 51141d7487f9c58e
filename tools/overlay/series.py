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
class Patched:
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
) -> list[Patched]:
    """Apply the patches in order to upstream's files.

    Leave out the patches of ``optional`` paths that are not at hand, and those that follow upon
    them.

    Raises:
        OverlayError: a patch does not apply, or touches a file that upstream does not have.
    """
    patched, tree, lost = [], {}, set()
    for name, patch in patches.items():
        header, diff = split(patch)
        paths = [check_relative(path, f"patches/{name}") for path in git.paths_of(diff)]
        before = {path: tree.get(path, original(path)) for path in paths}
        missing = {path for path, data in before.items() if data is None or path in lost}
        if not_there := missing.difference(optional):
            raise OverlayError(FAILED, f"patches/{name}: upstream has no {min(not_there)}")
        if missing:
            lost.update(paths)
            patched.append(Patched(name, header, diff, {}, left_out=True))
            continue
        after = git.apply(f"patches/{name}", diff, before)[0] if diff else {}
        tree |= after
        sides = {path: (data, after[path]) for path, data in before.items()}
        patched.append(Patched(name, header, diff, sides))
    return patched


def last_tree(patched: Iterable[Patched]) -> dict[str, bytes]:
    """Return all patched files after the last patch."""
    return {path: after for one in patched for path, (_, after) in one.files.items()}


def originals(patched: list[Patched]) -> dict[str, bytes]:
    """Return all patched files before the first patch."""
    return {path: sides[0] for one in reversed(patched) for path, sides in one.files.items()}


def port(patched: Iterable[Patched], original: Original) -> list[tuple[Patched, str, list[str]]]:
    """Carry the patches to other files: apply each, or else merge it three ways.

    Changes that conflict are left out. Return each patch, how it got there, and the files in which
    it conflicts.
    """
    ported, tree = [], {}
    for one in patched:
        paths = git.paths_of(one.diff)
        ours = {path: tree.get(path, original(path)) for path in paths}
        there = {path: data for path, data in ours.items() if data is not None}
        conflicts = [path for path in paths if path not in there]
        try:
            after, moved = git.apply(one.name, one.diff, there)
            state = "applies with offset" if moved else "applies"
        except OverlayError:
            after = {}
            for path, data in ({} if one.left_out else there).items():
                sides = data, *one.files[path]
                after[path], clean = git.merge(*sides)
                if not clean:
                    conflicts.append(path)
                    after[path], _ = git.merge(*sides, "--ours")
            conflicts = paths if one.left_out else conflicts
            state = "conflicts" if conflicts else "merges" if after != there else "already there"
            state = "left out" if one.left_out and not there else state
        files = {path: (ours[path], data) for path, data in after.items() if data != ours[path]}
        tree |= after
        ported.append((replace(one, files=files), state, conflicts))
    return ported


def carry(
    patched: list[Patched], owner: int, path: str, applied: bytes, edited: bytes, original: Original
) -> None:
    """Put an edit of a fully patched file into patch ``owner``, and carry it through later ones.

    Raises:
        OverlayError: the edit conflicts with a later patch.
    """
    before = last_tree(patched[:owner]).get(path, original(path))
    for one in patched[owner:]:
        if path in one.files or one is patched[owner]:
            _, after = one.files.get(path, (before, before))
            merged, clean = git.merge(after, applied, edited)
            if not clean:
                what = f"{path}: the edit meets lines of patches after {one.name}"
                raise OverlayError(FAILED, what)
            one.files[path] = before, merged
            before = merged
