# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What applying has to change, worked out in full before anything is written."""

from dataclasses import dataclass

from overlay import git, series
from overlay.checkout import Checkout, FileState, parents, same, sha256
from overlay.errors import DIFFERS_FROM_LOCK, FAILED, LOCAL_EDITS, OverlayError
from overlay.patchset import PatchSet
from overlay.store import Changes, Manifest, Store, Touched


@dataclass
class Plan:
    """From one manifest to another (None: nothing applied), with every path that must change."""

    changes: Changes
    old: Manifest | None
    new: Manifest

    def is_done(self) -> bool:
        """Nothing would change."""
        same_record = self.old is not None and self.old.to_json() == self.new.to_json()
        return not self.changes and same_record


def refuse(code: int, lines: list[str]) -> None:
    """Raise where there is something to say."""
    if lines:
        raise OverlayError(code, *lines)


def is_linked(manifest: Manifest | None) -> bool:
    return manifest is not None and any(e.ours[-1].link for e in manifest.files.values())


def look_at(checkout: Checkout, paths: list[str]) -> dict[str, FileState | None]:
    """The state of every path; all that lie behind a symlink are refused at once."""
    now, refused = {}, []
    for path in paths:
        try:
            now[path] = checkout.look(path)
        except OverlayError as error:
            if error.code != DIFFERS_FROM_LOCK:
                raise
            refused += [line for line in error.lines if line not in refused]
    refuse(DIFFERS_FROM_LOCK, refused)
    return now


def plan_apply(
    patchset: PatchSet,
    checkout: Checkout,
    store: Store,
    link: bool,
    merged: dict[str, bytes] | None = None,
    version: str | None = None,
) -> Plan:
    """The way from the checkout as it is to the patch set as it is.

    Where an earlier state of the patch set is applied, the new one starts from the originals. With
    ``merged``, the patched files are these, from the patches for ``version``, and need not be in
    the lock.

    Raises:
        OverlayError: a file differs from the lock, or local edits would be lost.
    """
    patchset.check_against_lock()
    locked = patchset.lock.changed_in(checkout.version) if merged is None else {}
    patched = {p: after for p, (_, after) in locked.items() if patchset.lock.is_patched(p)}
    if merged:
        patched = {path: sha256(data) for path, data in merged.items()}
    old = store.manifest()
    known = old.files if old else {}
    touched = sorted({*locked, *patched, *patchset.overlay, *known})
    now = look_at(checkout, touched)
    before = {path: known[path].before if path in known else now[path] for path in touched}
    differ = [
        _why_it_differs(path, now[path], after)
        for path, (digest, after) in locked.items()
        if before[path] is None or before[path].sha256 != digest
    ]
    refuse(DIFFERS_FROM_LOCK, sorted(differ))

    wanted = _wanted(patchset, patched, before, link or is_linked(old))
    edited = []
    for path in touched:
        after = wanted.get(path)
        if path in known:
            if not same(now[path], None, known[path].before, *known[path].ours, after):
                edited.append(f"{path} was edited since the overlay was applied")
        elif path in patchset.overlay and path not in locked and not same(now[path], None, after):
            if not _is_upstream(patchset, checkout, path, now[path], merged is not None):
                edited.append(f"{path} exists and is not ours: an overlay file would replace it")
    refuse(LOCAL_EDITS, edited)

    needed = {folder for path in wanted for folder in parents(path)}
    missing = {folder for folder in needed if checkout.look(folder) is None}
    folders = needed & (missing | set(old.folders if old else ()))
    files = {path: Touched(before[path], [state]) for path, state in wanted.items()}
    ends = {path: wanted.get(path, before[path]) for path in touched}
    changes = {path: (now[path], ends[path]) for path in touched if not same(now[path], ends[path])}
    return Plan(changes, old, Manifest(version or checkout.version, files, sorted(folders)))


def _wanted(
    patchset: PatchSet,
    patched: dict[str, str],
    before: dict[str, FileState | None],
    link: bool,
) -> dict[str, FileState]:
    """The state that the patch set gives to each path it touches."""
    wanted = {
        path: FileState(sha256=digest, mode=before[path].mode) for path, digest in patched.items()
    }
    for path, source in patchset.overlay.items():
        mode = before[path].mode if before[path] else 0o755 if source.executable else 0o644
        if link:
            wanted[path] = FileState(link=str(source.path))
        else:
            wanted[path] = FileState(sha256=source.sha256, mode=mode)
    return wanted


def contents_of(
    plan: Plan, patchset: PatchSet, store: Store, patched: dict[str, bytes] | None = None
) -> dict[str, bytes]:
    """The contents, by sha256, that the changes of the plan put in place."""
    checkout, known = store.checkout, plan.old.files if plan.old else {}

    def original(path: str) -> bytes | None:
        state = plan.new.files[path].before if path in plan.new.files else None
        if state is None or state.sha256 is None:
            return None
        return store.original(state.sha256) if path in known else checkout.read(path)

    found = {}
    for path, (_, then) in plan.changes.items():
        if then is None or then.sha256 is None:
            continue
        if path not in plan.new.files:
            found[then.sha256] = store.original(then.sha256)
        elif path in patchset.overlay:
            found[then.sha256] = patchset.overlay[path].path.read_bytes()
        else:
            if patched is None:
                steps = series.build(patchset.series(), original, store.scratch())
                patched = steps[-1].tree
            found[sha256(patched[path])] = patched[path]
            if then.sha256 not in found:
                raise OverlayError(FAILED, f"{path}: the patches give another file than the lock")
    return found


def _why_it_differs(path: str, now: FileState | None, after: str) -> str:
    if now is None:
        return f"{path} is missing"
    if now.sha256 == after:
        return f"{path} is patched already, but its original is lost: restore it or fetch anew"
    return f"{path} differs from the lock"


def _is_upstream(
    patchset: PatchSet, checkout: Checkout, path: str, now: FileState, any_commit: bool
) -> bool:
    """Whether a file that the sdist lacks is as the pinned commit of a git checkout has it, or with
    ``any_commit`` its own; then it is replaced like any upstream file, and --revert restores it."""
    if now.sha256 is None:
        return False
    version = patchset.lock.versions.get(checkout.version)
    revision = "HEAD" if any_commit else version.commit or version.tag
    return git.is_committed(checkout.root, revision, path, checkout.read(path))
