# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The series of patches: the files after each of them, on the pin or another version."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from overlay import git, header
from overlay.checkout import check_relative
from overlay.errors import FAILED, OverlayError

Original = Callable[[str], bytes | None]  # returns upstream's file at a path, or None


@dataclass
class Step:
    """One patch: the files that it touches, and all patched files after it."""

    name: str
    header: bytes
    paths: set[str]
    tree: dict[str, bytes]


def build(patches: dict[str, bytes], original: Original, scratch: Path | None = None) -> list[Step]:
    """Apply the patches in order to upstream's files.

    Raises:
        OverlayError: a patch does not apply, or touches a file that upstream does not have.
    """
    steps, tree = [], {}
    for name, patch in patches.items():
        head, diff = header.split(patch)
        files = {}
        for path in git.touched(f"patches/{name}", diff) if diff else ():
            check_relative(path, f"patches/{name}")
            data = tree.get(path, original(path))
            if data is None:
                raise OverlayError(FAILED, f"patches/{name}: upstream has no {path}")
            files[path] = data
        if diff:
            tree = tree | git.apply(f"patches/{name}", diff, files, scratch)[0]
        steps.append(Step(name, head, set(files), tree))
    return steps


def last_tree(steps: list[Step]) -> dict[str, bytes]:
    """Return all patched files after the last patch."""
    return steps[-1].tree if steps else {}


def render(steps: list[Step], original: Original) -> dict[str, bytes]:
    """Return the canonical text of each patch: its changes to the files before it."""
    texts, before = {}, {}
    for step in steps:
        old = {path: before.get(path, original(path)) for path in step.paths}
        diff = git.diff(old, {path: step.tree[path] for path in step.paths})
        texts[step.name] = header.join(step.header, diff) if diff else b""
        before = step.tree
    return texts


def port(
    steps: list[Step], old: Original, new: Original
) -> tuple[list[Step], dict[str, list[int]]]:
    """Port the steps to the originals of another version, each patch by a three-way merge.

    Conflicting changes are left out. Also return the steps that conflict in each file.
    """
    ported, tree, before, conflicts = [], {}, {}, defaultdict(list)
    for index, step in enumerate(steps):
        paths = set()
        for path in step.paths:
            ours = tree.get(path, new(path))
            if ours is None:
                conflicts[path].append(index)
                continue
            change = before.get(path, old(path)), step.tree[path]
            merged, clean = git.merge(ours, *change)
            if not clean:
                conflicts[path].append(index)
                merged, _ = git.merge(ours, *change, "--ours")
            if merged != ours:
                paths.add(path)
            tree = tree | {path: merged}
        before = step.tree
        ported.append(Step(step.name, step.header, paths, tree))
    return ported, dict(conflicts)


def carry(
    steps: list[Step], owner: int, path: str, applied: bytes, edited: bytes, original: Original
) -> None:
    """Put an edit of a fully patched file into step ``owner``, and carry it through the later
    steps.

    Raises:
        OverlayError: the edit conflicts with a later patch.
    """
    for step in steps[owner:]:
        merged, clean = git.merge(step.tree.get(path, original(path)), applied, edited)
        if not clean:
            raise OverlayError(FAILED, f"{path}: the edit meets lines of patches after {step.name}")
        step.tree = step.tree | {path: merged}
    steps[owner].paths.add(path)
