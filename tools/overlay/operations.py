# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""``apply_overlay.sh``: apply, check, status and revert on one checkout."""

from overlay.checkout import Checkout, FileState, same
from overlay.errors import LOCAL_EDITS, OverlayError
from overlay.patchset import PatchSet
from overlay.plan import Plan, contents_of, plan_apply, refuse
from overlay.store import Store
from overlay.three_way import merge_onto


def apply(patchset: PatchSet, checkout: Checkout, link: bool) -> list[str]:
    """Bring the checkout to the present state of the patch set; links stay links."""
    store = Store(checkout)
    with store.locked():
        plan = plan_apply(patchset, checkout, store, link)
        if plan.is_done():
            return ["already applied"]
        store.move(plan.old, plan.new, plan.changes, contents_of(plan, patchset, store))
    return [_done(plan)]


def three_way(patchset: PatchSet, checkout: Checkout) -> tuple[str, list[str]]:
    """Merge the patch set into a git tree whose files differ from the lock.

    Returns what was done, and what is left to do by hand.
    """
    store = Store(checkout)
    with store.locked():
        merged = merge_onto(patchset, checkout, store)
        plan = plan_apply(patchset, checkout, store, False, merged.files, merged.base)
        if not plan.is_done():
            store.move(
                plan.old, plan.new, plan.changes, contents_of(plan, patchset, store, merged.files)
            )
    return _done(plan), merged.notes


def check(patchset: PatchSet, checkout: Checkout) -> list[str]:
    """What ``apply`` would do; writes nothing."""
    plan = plan_apply(patchset, checkout, Store(checkout), False)
    if plan.is_done():
        return ["already applied"]
    return [f"would change {_count(plan.changes)}", *sorted(plan.changes)]


def revert(checkout: Checkout) -> list[str]:
    """Give the originals back, byte for byte."""
    store = Store(checkout)
    with store.locked():
        old = store.manifest()
        if old is None:
            return ["not applied"]
        now = {path: checkout.look(path) for path in old.files}
        edited = [p for p, e in old.files.items() if not same(now[p], None, e.before, *e.ours)]
        refuse(LOCAL_EDITS, [f"{path} was edited since the overlay was applied" for path in edited])
        ends = {path: entry.before for path, entry in old.files.items()}
        changes = {path: (now[path], end) for path, end in ends.items() if not same(now[path], end)}
        digests = {then.sha256 for _, then in changes.values() if then and then.sha256}
        store.move(old, None, changes, {digest: store.original(digest) for digest in digests})
    return [f"reverted: {_count(changes)} changed"]


def status(patchset: PatchSet, checkout: Checkout) -> list[str]:
    """One of applied, not applied, modified since, partly applied; then the files it is about."""
    store = Store(checkout)
    manifest = store.manifest()
    if manifest is None:
        return _status_without_manifest(patchset, checkout)
    lost, edited = [], []
    for path, entry in sorted(manifest.files.items()):
        now = _look(checkout, path)
        if not same(now, None, entry.before, *entry.ours):
            edited.append(path)
        elif not same(now, entry.ours[-1]):
            lost.append(path)
    if edited:
        return ["modified since", *edited]
    if lost:
        return ["partly applied: apply again to repair", *lost]
    locked = patchset.lock.changed_in(checkout.version)
    files = manifest.files.items()
    merged = [p for p, e in files if p in locked and _digest(e.before) != locked[p][0]]
    if merged or not locked:
        return [f"applied: merged from the patches for {manifest.version}"]
    if plan_apply(patchset, checkout, store, False).is_done():
        return [f"applied: {_count(manifest.files)}"]
    return ["applied: an earlier state of the patch set; apply again to update"]


def _status_without_manifest(patchset: PatchSet, checkout: Checkout) -> list[str]:
    locked = sorted(patchset.lock.changed_in(checkout.version).items())
    now = {path: _digest(_look(checkout, path)) for path, _ in locked}
    if patched := [path for path, (_, after) in locked if now[path] == after]:
        return ["partly applied: patched files without their originals", *patched]
    if differ := [path for path, (before, _) in locked if now[path] != before]:
        return ["not applied: files differ from the lock", *differ]
    return ["not applied"]


def _look(checkout: Checkout, path: str) -> FileState | None:
    """As ``Checkout.look``; a path behind a symlink counts as absent."""
    try:
        return checkout.look(path)
    except OverlayError:
        return None


def _digest(state: FileState | None) -> str | None:
    return state and state.sha256


def _done(plan: Plan) -> str:
    return f"{'updated' if plan.old else 'applied'}: {_count(plan.changes)} changed"


def _count(paths) -> str:
    return f"{len(paths)} file{'s' * (len(paths) != 1)}"
