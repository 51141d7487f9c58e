# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Write the canonical patches and the lock, or check them.

The files that patches change come from the sdists, or, if only git checkouts have them, from the
given checkout; without one, the patches of such files and their part of the lock stay as they are.
"""

from dataclasses import replace

from overlay import git, series
from overlay.checkout import Checkout, digest, sha256
from overlay.errors import FAILED, OverlayError
from overlay.fetch import upstream
from overlay.patchset import BY_OVERLAY, LockedFile, PatchSet, check_version
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
    original = _originals(patchset, lock.pin, checkout)
    kept = _kept(patchset, patches, original)
    steps = series.build({n: p for n, p in patches.items() if n not in kept}, original)
    if checkout:
        steps, lines = _take_edits(patchset, checkout, steps, into)
    texts = {step.name: step.text() for step in steps}
    for name in [name for name, text in texts.items() if not text]:
        if not series.split(patches[name])[1]:
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
    return lambda path: sdist[path] if path in sdist else store.original(path, manifest)


def _kept(patchset: PatchSet, patches: Texts, original: Original) -> Texts:
    """Return the patches of git-only files that are not at hand.

    Raises:
        OverlayError: such a patch was edited.
    """
    kept = {}
    for path, entry in patchset.lock.git_only().items():
        for name in entry.by if original(path) is None else ():
            if name in patches:  # else it was deleted
                kept[name] = patches[name]
                if sha256(patches[name]) != patchset.lock.patches[name]:
                    what = f"patches/{name} was edited: refresh with a git checkout, which has"
                    raise OverlayError(FAILED, f"{what} {path}")
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
        steps, conflicts = series.port(steps, original)
        lock.pin = version
    sdist, applied = upstream(lock, version, patchset.root), series.last_tree(steps)
    for path, data in applied.items():
        entry = manifest.files.get(path)
        if entry is None and path not in sdist:
            continue  # its patch is new, or was left out
        if entry is None or digest(entry[0]) != sha256(original(path)):
            raise OverlayError(FAILED, f"{path}: its original is not that of {version}")
        if version == manifest.version and digest(entry[-1]) != sha256(data):
            what = f"{checkout.root} has not the present patches applied (see {path})"
            raise OverlayError(FAILED, what)
    # A git checkout has other files than the sdist. They count only where a patch is applied.
    paths = [path for path in sdist if path.startswith("megatron/") and path.endswith(".py")]
    paths += [path for path in applied if path not in sdist and path in manifest.files]
    edits = {path: checkout.read(path) for path in paths if path not in patchset.overlay}
    before = {path: applied.get(path, original(path)) for path in edits}
    edits = {path: data for path, data in edits.items() if data not in (None, before[path])}
    if unresolved := [path for path, data in edits.items() if b"\n<<<<<<< " in data]:
        raise OverlayError(FAILED, f"{unresolved[0]} has conflict markers left: resolve them")
    owners = {path: _owner(steps, path, conflicts.get(path), into) for path in edits}
    for path, edited in edits.items():
        series.carry(steps, owners[path], path, before[path], edited, original)
    return steps, [f"{len(edits)} edited", *edits]


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
    found = conflicting or [i for i, step in enumerate(steps) if path in step.files]
    if len(found) != 1:
        names = ", ".join(steps[index].name for index in found) or "no patch"
        raise OverlayError(FAILED, f"{path} belongs to {names}: name one with --into NNNN:{path}")
    return found[0]


def _lock_files(patchset: PatchSet, texts: Texts, kept: Texts, checkout: Checkout | None) -> None:
    """Update the lock's tables by applying the patches to every version in it."""
    lock, files = patchset.lock, {}
    for path, entry in lock.git_only().items():
        if kept.keys() & set(entry.by):
            before, after = (
                dict.fromkeys(lock.versions, next(iter(side.values())))
                for side in (entry.before, entry.after)
            )
            files[path] = replace(entry, before=before, after=after)
    for version in lock.versions:
        sdist = upstream(lock, version, patchset.root)
        original = _originals(patchset, version, checkout)
        try:
            steps = series.build(texts, original)
        except OverlayError as error:
            raise OverlayError(FAILED, f"on {version}: {error.lines[0]}") from None
        for step in steps:
            if step.files.keys() - sdist.keys() and step.files.keys() & sdist.keys():
                what = "changes files of the sdist and others: make two patches of it"
                raise OverlayError(FAILED, f"patches/{step.name} {what}")
        after = series.last_tree(steps)
        by = {path: tuple(step.name for step in steps if path in step.files) for path in after}
        for path, ours in patchset.overlay.items():
            if path in after:
                raise OverlayError(FAILED, f"{path} is both an overlay file and patched")
            if path in sdist:
                after[path], by[path] = ours.read_bytes(), (BY_OVERLAY,)
        for path, data in after.items():
            entry = files.setdefault(path, LockedFile(by[path], {}, {}, path not in sdist))
            entry.before[version], entry.after[version] = sha256(original(path)), sha256(data)
    lock.locked = list(lock.versions)
    lock.patches = {name: sha256(text) for name, text in sorted((texts | kept).items())}
    lock.files = files


def _write(patchset: PatchSet, patches: Texts, texts: Texts, only_check: bool) -> list[str]:
    folder, files = patchset.patch_dir, texts | {"upstream.toml": patchset.lock.text().encode()}
    present = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    stale = [name for name, text in files.items() if present.get(name) != text]
    gone = [name for name in patches if name not in texts]
    if only_check and stale + gone:
        lines = [f"patches/{name} is stale: run `make lock`" for name in stale + gone]
        raise OverlayError(FAILED, *lines)
    git.write_files(folder, {name: files[name] for name in stale})
    for name in gone:
        (folder / name).unlink()
    return [f"wrote patches/{name}" for name in stale] or ["patches and lock are up to date"]


def _adopt(patchset: PatchSet, checkout: Checkout) -> None:
    """Record in the checkout's manifest that its present files are those of the new lock."""
    store, lock = Store(checkout), patchset.lock
    original = _originals(patchset, lock.pin, checkout)
    with store.locked():
        manifest = store.manifest() or Manifest("", {})
        files = {p: states for p, states in manifest.files.items() if p in patchset.overlay}
        for path in filter(lock.is_patched, lock.changed_in(lock.pin)):
            if (data := original(path)) is None:
                continue  # this tree has no git-only files
            store.keep(data)
            now = checkout.look(path)
            mode = now.partition(" ")[0]
            known = manifest.files.get(path, [f"{mode} {sha256(data)}"])
            files[path] = [known[0], now]
        store.write(Manifest(lock.pin, files))
