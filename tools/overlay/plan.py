# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What applying or reverting has to change, worked out in full before anything is written."""

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from overlay import git
from overlay.checkout import Checkout, FileState, parents, same
from overlay.errors import DIFFERS_FROM_LOCK, FAILED, LOCAL_EDITS, OverlayError
from overlay.patchset import BY_OVERLAY, PatchSet
from overlay.store import Manifest, Store, TouchedFile, Transaction


@dataclass
class Problems:
    """Files that stand in the way, by the reason."""

    differ: list[str]
    edited: list[str]

    def raise_if_any(self) -> None:
        if self.differ:
            raise OverlayError(DIFFERS_FROM_LOCK, *self.differ)
        if self.edited:
            raise OverlayError(LOCAL_EDITS, *self.edited)


def wanted_states(
    patchset: PatchSet, before: dict[str, FileState | None], link: bool
) -> dict[str, FileState]:
    """The state that the patch set gives to each path it touches, by path."""
    wanted = {}
    for path, source in patchset.overlay.items():
        mode = before[path].mode if before[path] else 0o755 if source.executable else 0o644
        if link:
            wanted[path] = FileState(link=str(source.path))
        else:
            wanted[path] = FileState(sha256=source.sha256, mode=mode)
    for path, entry in patchset.lock.files.items():
        if path not in wanted and before[path]:
            wanted[path] = FileState(sha256=entry.after, mode=before[path].mode)
    return wanted


def plan_apply(patchset: PatchSet, checkout: Checkout, store: Store, link: bool) -> Transaction:
    """The transaction that puts the patch set as it is now onto the checkout as it is now.

    Where an earlier state of the patch set is applied, the new one starts from the originals.

    Raises:
        OverlayError: a file differs from the lock, or local edits would be lost.
    """
    patchset.check_against_lock()
    old = store.manifest()
    known = old.files if old else {}
    touched = sorted({*patchset.lock.files, *patchset.overlay, *known})
    now, problems = {}, Problems([], [])
    for path in touched:
        try:
            now[path] = checkout.look(path)
        except OverlayError as error:
            if error.code != DIFFERS_FROM_LOCK:
                raise
            problems.differ.extend(line for line in error.lines if line not in problems.differ)
    problems.raise_if_any()

    before = {path: known[path].before if path in known else now[path] for path in touched}
    wanted = wanted_states(patchset, before, link)
    for path in touched:
        entry, after = patchset.lock.files.get(path), wanted.get(path)
        if entry and (before[path] is None or before[path].sha256 != entry.before):
            problems.differ.append(_why_it_differs(path, now[path], entry.after))
        elif path in known:
            allowed = (known[path].before, known[path].after, after)
            if now[path] and not any(same(now[path], state) for state in allowed):
                problems.edited.append(f"{path} was edited since the overlay was applied")
        elif not entry and now[path] and not same(now[path], after):
            if not _is_upstream(patchset, checkout, path):
                problems.edited.append(
                    f"{path} exists and is not ours: an overlay file would replace it"
                )
    problems.raise_if_any()

    needed = {folder for path in wanted for folder in parents(path)}
    missing = {folder for folder in needed if checkout.look(folder) is None}
    folders = needed & (missing | set(old.folders if old else ()))
    new = Manifest(
        {path: TouchedFile(before[path], state) for path, state in wanted.items()}, sorted(folders)
    )
    ends = {path: wanted.get(path, before[path]) for path in touched}
    changes = {path: (now[path], ends[path]) for path in touched if not same(now[path], ends[path])}
    return Transaction(changes, old, new)


def plan_revert(checkout: Checkout, store: Store) -> Transaction | None:
    """The transaction that gives the originals back, or None where nothing is applied.

    Raises:
        OverlayError: local edits would be lost.
    """
    old = store.manifest()
    if old is None:
        return None
    problems, changes = Problems([], []), {}
    for path, entry in old.files.items():
        now = checkout.look(path)
        if now and not same(now, entry.after) and not same(now, entry.before):
            problems.edited.append(f"{path} was edited since the overlay was applied")
        elif not same(now, entry.before):
            changes[path] = (now, entry.before)
    problems.raise_if_any()
    return Transaction(changes, old, None)


def is_done(transaction: Transaction) -> bool:
    """Nothing would change."""
    old, new = transaction.old, transaction.new
    return not transaction.changes and old is not None and old.to_json() == new.to_json()


def keep_contents(transaction: Transaction, patchset: PatchSet, store: Store) -> None:
    """Put every content that the transaction, or its undoing, may need into the store."""
    checkout = store.checkout
    states = [state for pair in transaction.changes.values() for state in pair]
    wanted = {state.sha256 for state in states if state and state.sha256}
    for path, (now, _) in transaction.changes.items():
        if now and now.sha256:
            store.keep(checkout.path(path).read_bytes())
    files = transaction.new.files if transaction.new else {}
    for path, entry in files.items():
        if entry.before and path not in (transaction.old.files if transaction.old else {}):
            store.keep(checkout.path(path).read_bytes())
    patched = []
    for path, entry in files.items():
        if entry.after.sha256 not in wanted:
            continue
        if path in patchset.overlay:
            store.keep(patchset.overlay[path].path.read_bytes())
        else:
            patched.append(path)
    if patched:
        _keep_patched(patchset, files, store)


def _keep_patched(patchset: PatchSet, files: dict[str, TouchedFile], store: Store) -> None:
    """Patch copies of the originals inside the store, and keep the results."""
    with tempfile.TemporaryDirectory(dir=store.root, prefix="scratch-") as folder:
        scratch = Path(folder)
        paths = [path for path in files if path in patchset.lock.files]
        paths = [path for path in paths if patchset.lock.files[path].by != (BY_OVERLAY,)]
        for path in paths:
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            (scratch / path).write_bytes(store.contents(files[path].before.sha256))
        for name in patchset.series():
            git.apply(f"patches/{name}", patchset.patch(name), scratch)
        for path in paths:
            if store.keep((scratch / path).read_bytes()) != patchset.lock.files[path].after:
                raise OverlayError(FAILED, f"{path}: the patches give another file than the lock")


def _why_it_differs(path: str, now: FileState | None, after: str) -> str:
    if now is None:
        return f"{path} is missing"
    if now.sha256 == after:
        return f"{path} is patched already, but its original is lost: restore it or fetch anew"
    return f"{path} differs from the lock"


def _is_upstream(patchset: PatchSet, checkout: Checkout, path: str) -> bool:
    """Whether a file that the sdist lacks is as the pinned commit of a git checkout has it; then it
    is replaced like any upstream file, and comes back with --revert."""
    file = checkout.path(path)
    if file.is_symlink() or not file.is_file():
        return False
    data = file.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    return blob == git.blob_in_commit(checkout.root, patchset.lock.commit, path)
