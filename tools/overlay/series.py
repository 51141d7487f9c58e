# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The patches one after the other: what each leaves, on the pin and upon another version."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from overlay import git, header
from overlay.checkout import check_relative
from overlay.errors import FAILED, OverlayError

Original = Callable[[str], bytes | None]  # upstream's file at a path, if there is one


@dataclass
class Step:
    """One patch: the files it touches, and all patched files as it leaves them."""

    name: str
    header: bytes
    paths: set[str]
    tree: dict[str, bytes]


def build(patches: dict[str, bytes], original: Original, scratch: Path | None = None) -> list[Step]:
    """Apply the patches in order to upstream's files.

    Raises:
        OverlayError: a patch does not apply, or touches what upstream does not have.
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
    """All patched files, with every patch."""
    return steps[-1].tree if steps else {}


def render(steps: list[Step], original: Original) -> dict[str, bytes]:
    """The canonical text of each patch: what it changes against what stands before it."""
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
    """The steps upon the originals of another version, each patch by a three-way merge.

    A change that conflicts stays out. Also returned: by file, the steps that conflict in it.
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
    """Put the edit of a fully patched file into step ``owner``, and through the later ones.

    Raises:
        OverlayError: the edit meets lines of a later patch.
    """
    for step in steps[owner:]:
        merged, clean = git.merge(step.tree.get(path, original(path)), applied, edited)
        if not clean:
            raise OverlayError(FAILED, f"{path}: the edit meets lines of patches after {step.name}")
        step.tree = step.tree | {path: merged}
    steps[owner].paths.add(path)
