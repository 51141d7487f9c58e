# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Write the canonical patches and the lock, or check them.

The files that patches change come from the sdists, or, if only git checkouts have them, from the
given checkout; without one, the patches of such files and their part of the lock stay as they are.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from overlay import git, series
from overlay.checkout import Checkout, sha256
from overlay.errors import FAILED, OverlayError, refuse
from overlay.fetch import upstream
from overlay.journal import Journal, Known
from overlay.patchset import Lock, PatchSet, check_version
from overlay.series import Original, Patched

Texts = dict[str, bytes]  # patches by name


def refresh(
    patchset: PatchSet,
    checkout: Checkout | None = None,
    into: Collection[str] = (),
    pin: str | None = None,
    only_check: bool = False,
) -> list[str]:
    """Bring patches and lock to their canonical form.

    Args:
        checkout: its edits go into the patches that ``into`` names, or that own the files.
        pin: the version to which the patches are carried.

    Raises:
        OverlayError: the patch set is inconsistent; or, with ``only_check``, not in canonical form.
    """
    lock, patches, lines, conflicts = patchset.lock, patchset.series(), [], {}
    journal = Journal(checkout) if checkout else None

    def upstream_at(version: str) -> Original:
        sdist = upstream(lock, version, patchset.root)
        return lambda path: sdist[path] if path in sdist else journal and journal.read(path)

    patched = series.build(patches, upstream_at(lock.pin), lock.git_only)
    for one in patched:
        if one.left_out and sha256(patches[one.name]) != lock.patches.get(one.name):
            what = f"patches/{one.name} was edited: refresh with a git checkout, which has"
            raise OverlayError(FAILED, f"{what} {', '.join(git.paths_of(one.diff))}")
    if checkout:
        lines = _take_edits(patchset, journal, patched, into, upstream_at(lock.pin))
    elif pin:
        patched, conflicts = _move_pin(lock, patched, pin, upstream_at)
        lines = [f"conflict: {path} with {name}" for name in conflicts for path in conflicts[name]]
    texts = {one.name: one.text() for one in patched}
    for one in [one for one in patched if not texts[one.name]]:
        if one.name in conflicts:
            texts[one.name] = one.header
        elif not one.diff:
            raise OverlayError(FAILED, f"patches/{one.name} changes nothing: fill or delete it")
        else:
            del texts[one.name]
            lines.append(f"dropped patches/{one.name}: it changes nothing any more")
    _lock_files(patchset, texts, upstream_at)
    lines += _write(patchset, patches, texts, only_check)
    if checkout:
        _adopt(patchset, checkout, patched)
    return lines


def _move_pin(
    lock: Lock, patched: list[Patched], pin: str, upstream_at: Callable[[str], Original]
) -> tuple[list[Patched], dict[str, list[str]]]:
    """Carry the patches to another version of the lock, which takes the pin's place.

    Also return the files in which patches conflict; these changes are left out.
    """
    if pin not in lock.versions:
        raise OverlayError(FAILED, f"the lock has no version {pin}: add it first")
    ported = series.port(patched, upstream_at(pin))
    if pin != lock.pin:
        del lock.versions[lock.pin]
    lock.pin = pin
    conflicts = {one.name: paths for one, state, paths in ported if state == "conflicts"}
    return [one for one, _, _ in ported], conflicts


def _take_edits(
    patchset: PatchSet,
    journal: Journal,
    patched: list[Patched],
    into: Collection[str],
    original: Original,
) -> list[str]:
    """Put the edits of a checkout of the pin into the patches; return lines that list the edits."""
    checkout, pin = journal.checkout, patchset.lock.pin
    check_version(checkout.root, checkout.version, [pin])
    sdist, applied = upstream(patchset.lock, pin, patchset.root), series.last_tree(patched)
    for path, data in applied.items():
        known = journal.paths.get(path)
        if known is None and path not in sdist:
            continue  # its patch is new, or was left out
        if not known or known.states[-1] != sha256(data):
            what = f"{checkout.root} has not the present patches applied (see {path})"
            raise OverlayError(FAILED, what)
    # A git checkout has other files than the sdist. They count only where a patch is applied.
    paths = [path for path in sdist if path.startswith("megatron/") and path.endswith(".py")]
    paths += [path for path in applied if path not in sdist and path in journal.paths]
    edits = {path: checkout.read(path) for path in paths if path not in patchset.overlay}
    before = {path: applied.get(path, original(path)) for path in edits}
    edits = {path: data for path, data in edits.items() if data not in (None, before[path])}
    owners = {path: _owner(patched, path, into) for path in edits}
    for path, edited in edits.items():
        series.carry(patched, owners[path], path, before[path], edited, original)
    return [f"{len(edits)} edited", *edits]


def _owner(patched: list[Patched], path: str, into: Collection[str]) -> int:
    """Return the index of the patch that an edit of ``path`` belongs to.

    It is the one that ``into`` names for this path or for all, else the only one that touches it.
    """
    named = [number for number, _, of in (i.partition(":") for i in into) if of in ("", path)]
    if named:
        found = [i for i, one in enumerate(patched) if one.name.startswith(f"{named[-1]}-")]
        if not found or patched[found[0]].left_out:
            raise OverlayError(FAILED, f"--into {named[-1]}: no patches/{named[-1]}-*.patch")
        return found[0]
    found = [i for i, one in enumerate(patched) if path in one.files]
    if len(found) != 1:
        names = ", ".join(patched[index].name for index in found) or "no patch"
        raise OverlayError(FAILED, f"{path} belongs to {names}: name one with --into NNNN:{path}")
    return found[0]


def _lock_files(patchset: PatchSet, texts: Texts, upstream_at: Callable[[str], Original]) -> None:
    """Update the lock's tables by applying the patches to every version in it."""
    lock, files, git_only = patchset.lock, {}, {}
    for version in lock.versions:
        sdist, original = upstream(lock, version, patchset.root), upstream_at(version)
        try:
            patched = series.build(texts, original, lock.git_only)
        except OverlayError as error:
            raise OverlayError(FAILED, f"on {version}: {error.lines[0]}") from None
        tree = series.last_tree(patched)
        for one in patched:
            if one.files.keys() - sdist.keys() and one.files.keys() & sdist.keys():
                what = "changes files of the sdist and others: make two patches of it"
                raise OverlayError(FAILED, f"patches/{one.name} {what}")
            for path in git.paths_of(one.diff) if one.left_out else ():
                git_only[path] = lock.git_only[path]
        twice = sorted(tree.keys() & patchset.overlay)
        refuse(FAILED, [f"{path} is both an overlay file and patched" for path in twice])
        tree |= {
            path: ours.read_bytes() for path, ours in patchset.overlay.items() if path in sdist
        }
        sides = {path: [sha256(original(path)), sha256(tree[path])] for path in sorted(tree)}
        files[version] = {path: both for path, both in sides.items() if path in sdist}
        git_only |= {path: both for path, both in sides.items() if path not in sdist}
    lock.patches = {name: sha256(text) for name, text in texts.items()}
    lock.files, lock.git_only = files, git_only


def _write(patchset: PatchSet, patches: Texts, texts: Texts, only_check: bool) -> list[str]:
    folder, files = patchset.patch_dir, texts | {"upstream.toml": patchset.lock.text().encode()}
    present = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    stale = [name for name, text in files.items() if present.get(name) != text]
    gone = [name for name in patches if name not in texts]
    if only_check:
        lines = [f"patches/{name} is stale: run `make lock`" for name in stale + gone]
        refuse(FAILED, lines)
    git.write_files(folder, {name: files[name] for name in stale})
    for name in gone:
        (folder / name).unlink()
    return [f"wrote patches/{name}" for name in stale] or ["patches and lock are up to date"]


def _adopt(patchset: PatchSet, checkout: Checkout, patched: list[Patched]) -> None:
    """Record in the checkout's journal that its present files are those of the new lock."""
    with Journal.locked(checkout) as journal:
        paths = {path: known for path, known in journal.paths.items() if path in patchset.overlay}
        for path, data in series.originals(patched).items():
            now = checkout.look(path)
            known = journal.paths.get(path, Known(replace(now, data=data), []))
            paths[path] = Known(known.original, [now.state])
        journal.write(paths)
