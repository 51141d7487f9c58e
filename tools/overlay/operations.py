# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""``apply_overlay.sh``: apply, check, status and revert on one checkout."""

import contextlib

from overlay.checkout import Checkout, same
from overlay.errors import OverlayError
from overlay.patchset import PatchSet
from overlay.plan import is_done, keep_contents, plan_apply, plan_revert
from overlay.store import Manifest, Store, Transaction


def apply(patchset: PatchSet, checkout: Checkout, link: bool) -> list[str]:
    """Bring the checkout to the present state of the patch set; links stay links."""
    store = Store(checkout)
    with store.locked():
        lines = _finish(store)
        transaction = plan_apply(patchset, checkout, store, link or _is_linked(store.manifest()))
        if is_done(transaction):
            return [*lines, "already applied"]
        _run(transaction, patchset, store)
    verb = "updated" if transaction.old else "applied"
    return [*lines, f"{verb}: {_count(transaction.changes)} changed"]


def check(patchset: PatchSet, checkout: Checkout) -> list[str]:
    """What ``apply`` would do; writes nothing."""
    store = Store(checkout)
    if store.pending():
        return ["an interrupted run would be finished first"]
    transaction = plan_apply(patchset, checkout, store, _is_linked(store.manifest()))
    if is_done(transaction):
        return ["already applied"]
    return [f"would change {_count(transaction.changes)}", *sorted(transaction.changes)]


def revert(patchset: PatchSet, checkout: Checkout) -> list[str]:
    """Give the originals back, byte for byte."""
    store = Store(checkout)
    with store.locked():
        lines = _finish(store)
        transaction = plan_revert(checkout, store)
        if transaction is None:
            return [*lines, "not applied"]
        _run(transaction, patchset, store)
    return [*lines, f"reverted: {_count(transaction.changes)} changed"]


def status(patchset: PatchSet, checkout: Checkout) -> list[str]:
    """One of applied, not applied, modified since, partly applied; then the files it is about."""
    store = Store(checkout)
    if pending := store.pending():
        return ["partly applied: the next run ends an interrupted one", *sorted(pending.changes)]
    manifest = store.manifest()
    if manifest is None:
        return _status_without_manifest(patchset, checkout)
    now = {path: _look(checkout, path) for path in manifest.files}
    lost, edited = [], []
    for path, entry in sorted(manifest.files.items()):
        if not same(now[path], entry.after):
            gone = now[path] is None or same(now[path], entry.before)
            (lost if gone else edited).append(path)
    if edited:
        return ["modified since", *edited]
    if lost:
        return ["partly applied: apply again to repair", *lost]
    if is_done(plan_apply(patchset, checkout, store, _is_linked(manifest))):
        return [f"applied: {_count(manifest.files)}"]
    return ["applied: an earlier state of the patch set; apply again to update"]


def _is_linked(manifest: Manifest | None) -> bool:
    return manifest is not None and any(entry.after.link for entry in manifest.files.values())


def _status_without_manifest(patchset: PatchSet, checkout: Checkout) -> list[str]:
    now = {path: _look(checkout, path) for path in patchset.lock.files}
    locked = sorted(patchset.lock.files.items())
    patched = [path for path, entry in locked if now[path] and now[path].sha256 == entry.after]
    if patched:
        return ["partly applied: patched files without their originals", *patched]
    differ = [
        path for path, entry in locked if now[path] is None or now[path].sha256 != entry.before
    ]
    return ["not applied: files differ from the lock", *differ] if differ else ["not applied"]


def _look(checkout: Checkout, path: str):
    """As ``Checkout.look``; a path behind a symlink counts as absent."""
    try:
        return checkout.look(path)
    except OverlayError:
        return None


def _finish(store: Store) -> list[str]:
    finished = store.finish_pending()
    store.tidy()
    return ["finished an interrupted run"] if finished else []


def _run(transaction: Transaction, patchset: PatchSet, store: Store) -> None:
    try:
        keep_contents(transaction, patchset, store)
        store.run(transaction)
    except (OverlayError, OSError):
        with contextlib.suppress(OSError):
            store.tidy()
        raise


def _count(paths) -> str:
    return f"{len(paths)} file{'s' * (len(paths) != 1)}"
