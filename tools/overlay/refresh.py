# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Write the canonical patches and the lock, or check them.

The files that patches change come from the sdists, or, if only git checkouts have them, from the
given checkout; without one, the patches of such files and their part of the lock stay as they are.
"""

from dataclasses import replace
from pathlib import Path

from overlay import git, header, replacements, series
from overlay.checkout import Checkout, digest, regular, sha256
from overlay.errors import FAILED, OverlayError
from overlay.fetch import upstream
from overlay.lock import BY_OVERLAY, LockedFile, check_version
from overlay.patchset import PatchSet
from overlay.series import Original, Step
from overlay.store import Manifest, Store

Texts = dict[str, bytes]  # patches by name


def refresh(
    patchset: PatchSet, checkout: Checkout | None, into: list[str], only_check: bool = False
) -> list[str]:
    """Bring patches and lock to their canonical form, including an applied checkout's edits.

    Raises:
        OverlayError: the patch set is inconsistent; or, with ``only_check``, not in canonical form.
    """
    lines: list[str] = []
    patches, lock, old_pin = patchset.series(), patchset.lock, patchset.lock.pin
    kept = _kept(patchset, checkout)
    steps = series.build(
        {name: patch for name, patch in patches.items() if name not in kept},
        _originals(patchset, lock.pin, checkout),
    )
    if checkout:
        steps, lines = _take_edits(patchset, checkout, steps, into)
    texts = series.render(steps, _originals(patchset, lock.pin, checkout))
    for name in [name for name, text in texts.items() if not text]:
        if not header.split(patches[name])[1]:
            raise OverlayError(FAILED, f"patches/{name} changes nothing: fill or delete it")
        del texts[name]
        lines.append(f"dropped patches/{name}: it changes nothing any more")
    if lock.pin != old_pin:
        del lock.versions[old_pin]
        lines.append(f"{old_pin} left the lock: {lock.pin} is the pin")
    _lock_files(patchset, texts, kept, checkout)
    lines += _write(patchset, patches, dict(sorted((texts | kept).items())), only_check)
    if checkout:
        _adopt(patchset, checkout)
    return lines


def _originals(patchset: PatchSet, version: str, checkout: Checkout | None) -> Original:
    """Return a lookup of upstream's files: the sdist's, or those that only the checkout has."""
    sdist = upstream(patchset.lock, version, patchset.root)
    if checkout is None:
        return sdist.get
    store = Store(checkout)
    manifest = store.manifest() or Manifest("", {})

    def original(path: str) -> bytes | None:
        if path in sdist:
            return sdist[path]
        state = manifest.files.get(path, [checkout.look(path)])[0]
        if digest(state) is None:
            return None
        return store.original(path, manifest) if path in manifest.files else checkout.read(path)

    return original


def _kept(patchset: PatchSet, checkout: Checkout | None) -> Texts:
    """Return the patches of git-only files if the checkout lacks some of these, else none.

    Raises:
        OverlayError: such a patch was edited.
    """
    lock, patches = patchset.lock, patchset.series()
    original = _originals(patchset, lock.pin, checkout)
    if all(original(path) is not None for path in lock.git_only()):
        return {}
    kept = {}
    for path, entry in lock.git_only().items():
        if not any(name in patches for name in entry.by):
            continue  # they were deleted
        for name in entry.by:
            if sha256(patches.get(name, b"")) != lock.patches[name]:
                message = (
                    f"patches/{name} was edited: refresh with a git checkout, which has {path}"
                )
                raise OverlayError(FAILED, message)
            kept[name] = patches[name]
    return kept


def _take_edits(
    patchset: PatchSet, checkout: Checkout, steps: list[Step], into: list[str]
) -> tuple[list[Step], list[str]]:
    """Return the steps with the checkout's edits, and lines that list these.

    A checkout onto whose version the patches were merged by ``--three-way`` moves the pin there.
    """
    lock, manifest = patchset.lock, Store(checkout).manifest()
    version, conflicts = checkout.version, {}
    check_version(checkout.root, version, lock.versions)
    original = _originals(patchset, version, checkout)
    if manifest is None or manifest.version != lock.pin:
        raise OverlayError(FAILED, f"{checkout.root} has not the patches for {lock.pin} applied")
    if version != lock.pin:
        steps, conflicts = series.port(steps, _originals(patchset, lock.pin, checkout), original)
        lock.pin = version
    applied = series.last_tree(steps)
    for path, data in applied.items():
        entry = manifest.files.get(path)
        if entry is None and path not in upstream(lock, version, patchset.root):
            continue  # its patch is new, or was left out
        if entry is None or digest(entry[0]) != sha256(original(path)):
            raise OverlayError(FAILED, f"{path}: its original is not that of {version}")
        if version == manifest.version and digest(entry[-1]) != sha256(data):
            raise OverlayError(
                FAILED, f"{checkout.root} has not the present patches applied (see {path})"
            )
    edits = _edits(patchset, checkout, applied, manifest)
    owners = {path: _owner(steps, path, conflicts.get(path), into) for path in edits}
    for path, edited in edits.items():
        before = applied.get(path, original(path))
        series.carry(steps, owners[path], path, before, edited, original)
    return steps, [f"{len(edits)} edited", *edits]


def _edits(
    patchset: PatchSet, checkout: Checkout, applied: dict[str, bytes], manifest: Manifest
) -> dict[str, bytes]:
    """Return upstream's Python files that differ from what the patches make of them."""
    edits = {}
    sdist = upstream(patchset.lock, patchset.lock.pin, patchset.root)
    beside = [path for path in applied if path not in sdist and path in manifest.files]
    for path, data in (sdist | dict.fromkeys(beside, b"")).items():
        if path not in beside and not (path.startswith("megatron/") and path.endswith(".py")):
            continue  # a git checkout has other such files than the sdist
        state = checkout.look(path)
        if path in patchset.overlay or state is None:
            continue
        if digest(state) != sha256(applied.get(path, data)):
            edits[path] = checkout.path(path).read_bytes()
            if b"\n<<<<<<< " in edits[path]:
                raise OverlayError(FAILED, f"{path} has conflict markers left: resolve them")
    return edits


def _owner(steps: list[Step], path: str, conflicting: list[int] | None, into: list[str]) -> int:
    """Return the index of the patch that an edit of ``path`` belongs to.

    It is the one that ``into`` names for this path or for all, else the only one that conflicted in
    it, else the only one that touches it.
    """
    named = [number for number, _, of in (i.partition(":") for i in into) if of in ("", path)]
    if named:
        found = [i for i, step in enumerate(steps) if step.name.startswith(f"{named[-1]}-")]
        if not found:
            raise OverlayError(FAILED, f"--into {named[-1]}: no patches/{named[-1]}-*.patch")
        return found[0]
    found = conflicting or [i for i, step in enumerate(steps) if path in step.paths]
    if len(found) != 1:
        names = ", ".join(steps[index].name for index in found) or "no patch"
        raise OverlayError(FAILED, f"{path} belongs to {names}: name one with --into NNNN:{path}")
    return found[0]


def _lock_files(patchset: PatchSet, texts: Texts, kept: Texts, checkout: Checkout | None) -> None:
    """Update the lock's tables by applying the patches to every version in it."""
    lock, files = patchset.lock, {}
    for path, entry in lock.git_only().items():
        if not kept.keys() & set(entry.by):
            continue
        sides = (next(iter(side.values())) for side in (entry.before, entry.after))
        before, after = (dict.fromkeys(lock.versions, side) for side in sides)
        files[path] = replace(entry, before=before, after=after)
    for version in lock.versions:
        files_of = upstream(lock, version, patchset.root)
        original = _originals(patchset, version, checkout)
        try:
            steps = series.build(texts, original)
        except OverlayError as error:
            raise OverlayError(FAILED, f"on {version}: {error.lines[0]}") from None
        after = dict(series.last_tree(steps))
        by = {path: tuple(s.name for s in steps if path in s.paths) for path in after}
        for step in steps:
            if step.paths - files_of.keys() and step.paths & files_of.keys():
                what = "changes files of the sdist and others: make two patches of it"
                raise OverlayError(FAILED, f"patches/{step.name} {what}")
        for path, source in patchset.overlay.items():
            if path in after:
                raise OverlayError(FAILED, f"{path} is both an overlay file and patched")
            if path in files_of:
                after[path], by[path] = source.path.read_bytes(), (BY_OVERLAY,)
        for path, data in after.items():
            entry = files.setdefault(path, LockedFile(by[path], {}, {}, path not in files_of))
            entry.before[version], entry.after[version] = sha256(original(path)), sha256(data)
    lock.locked = list(lock.versions)
    lock.patches = {name: sha256(text) for name, text in sorted((texts | kept).items())}
    lock.files = files


def _write(patchset: PatchSet, patches: Texts, texts: Texts, only_check: bool) -> list[str]:
    files = dict(texts)
    files["upstream.toml"] = patchset.lock.text().encode()
    stale = [name for name, text in files.items() if _read(patchset.patch_dir / name) != text]
    gone = [name for name in patches if name not in texts]
    if only_check and stale + gone:
        lines = [f"patches/{name} is stale: run `make lock`" for name in stale + gone]
        raise OverlayError(FAILED, *lines)
    git.write_files(patchset.patch_dir, {name: files[name] for name in stale})
    for name in gone:
        (patchset.patch_dir / name).unlink()
    return [f"wrote patches/{name}" for name in stale] or ["patches and lock are up to date"]


def _adopt(patchset: PatchSet, checkout: Checkout) -> None:
    """Record in the checkout's manifest that its present files are those of the new lock."""
    store, lock = Store(checkout), patchset.lock
    original = _originals(patchset, lock.pin, checkout)
    with store.locked():
        manifest = store.manifest() or Manifest(lock.pin, {})
        files = {p: states for p, states in manifest.files.items() if p in patchset.overlay}
        for path in filter(lock.is_patched, lock.changed_in(lock.pin)):
            if (data := original(path)) is None:
                continue  # this tree has no git-only files
            store.keep(data)
            now = checkout.look(path)
            known = manifest.files.get(path, [regular(now, sha256(data))])
            files[path] = [known[0], now]
        store.write(Manifest(lock.pin, files))


def check_headers(patchset: PatchSet) -> list[str]:
    """Check the header and size of every patch, the size of all, and replacements at run time.

    Raises:
        OverlayError: there are errors; it has a line for each.
    """
    wrong, total, patches = [], 0, patchset.series()
    for name, patch in patches.items():
        diff = header.split(patch)[1]
        changed = sum(git.touched(f"patches/{name}", diff).values()) if diff else 0
        wrong += header.problems(name, patch, changed)
        total += changed
    wrong += header.problems_of_all(len(patches), total)
    wrong += replacements.problems(patchset)
    if wrong:
        raise OverlayError(FAILED, *wrong)
    at_run_time = len(replacements.declared(patchset.root))
    return [
        f"{len(patches)} patch headers are in order, {total} changed lines; "
        f"{at_run_time} replacements at run time are declared"
    ]


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
