# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Merge the patches into upstream files that differ from the lock: ``apply_overlay.sh --three-way``.

Base is the file of the version that the patches are written for, ours is the file as the git tree
has it committed, theirs is the base with all patches.
"""

from dataclasses import dataclass

from overlay import git, series
from overlay.checkout import Checkout
from overlay.errors import LOCAL_EDITS
from overlay.fetch import upstream
from overlay.patchset import PatchSet
from overlay.plan import look_at, refuse
from overlay.store import Store


@dataclass
class Merged:
    """Patched files by path, the version of their base, and what is left to do by hand."""

    files: dict[str, bytes]
    base: str
    notes: list[str]


def merge_onto(patchset: PatchSet, checkout: Checkout, store: Store) -> Merged:
    """Merge every patched file.

    Raises:
        OverlayError: a file is not as the tree's last commit has it, so that a merge could not be
            told from an edit.
    """
    lock = patchset.lock
    base = checkout.version if checkout.version in lock.locked else lock.pin
    original = upstream(lock, base, patchset.root).get
    theirs = series.build(patchset.series(), original, store.scratch())[-1].tree
    by = {path: ", ".join(name[:4] for name in lock.files[path].by) for path in theirs}
    files, notes = {}, []
    for path, data in _committed(checkout, store, sorted({*theirs, *patchset.overlay})).items():
        if path not in theirs:
            # The sdist knows nothing of the examples that a git tree has.
            if data != original(path) and path.startswith("megatron/"):
                notes.append(f"review: {path} is ours, and upstream's is another than in {base}")
        elif data is None:
            notes.append(f"gone: {path}, which {by[path]} changed")
        else:
            labels = ["-L", "this tree", "-L", base, "-L", f"patches {by[path]}"]
            change = original(path), theirs[path]
            files[path], whole = git.merge(data, *change, *labels, scratch=store.scratch())
            notes += [] if whole else [f"conflict: {path} with {by[path]}"]
    return Merged(files, base, notes)


def _committed(checkout: Checkout, store: Store, paths: list[str]) -> dict[str, bytes | None]:
    """The files as they were before us, which must be as committed."""
    manifest = store.manifest()
    known = manifest.files if manifest else {}
    now, found, edited = look_at(checkout, paths), {}, []
    for path in paths:
        state = known[path].before if path in known else now[path]
        if state is None:
            found[path] = None
            continue
        data = b""
        if state.sha256:
            data = store.original(state.sha256) if path in known else checkout.read(path)
        if not state.sha256 or not git.is_committed(checkout.root, "HEAD", path, data):
            edited.append(f"{path} is not as this git tree's last commit has it: commit first")
        found[path] = data
    refuse(LOCAL_EDITS, edited)
    return found
