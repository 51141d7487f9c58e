# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Write the canonical patches and the lock, or check them.

The files that patches change come from the sdists, or, if only git checkouts have them, from the
given checkout; without one, the patches of such files and their part of the lock stay as they are.
So do the next version's patches and its part of the lock without a git directory that has it.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from overlay import git, series
from overlay.checkout import Checkout, sha256
from overlay.errors import FAILED, OverlayError, refuse
from overlay.fetch import next_files, upstream
from overlay.journal import Journal, Known
from overlay.patchset import NEXT, Lock, PatchSet, check_version, with_own
from overlay.series import Original, Patched

Texts = dict[str, bytes]  # patches by name


def refresh(
    patchset: PatchSet,
    checkout: Checkout | None = None,
    into: Collection[str] = (),
    pin: str | None = None,
    only_check: bool = False,
    next_directory: Path | None = None,
) -> list[str]:
    """Bring patches and lock to their canonical form.

    Args:
        checkout: its edits go into the patches that ``into`` names, or that own the files.
        pin: the version to which the patches are carried.
        next_directory: a git directory that has the next version.

    Raises:
        OverlayError: the patch set is inconsistent; or, with ``only_check``, not in canonical form.
    """
    lock, patches, lines, conflicts = patchset.lock, patchset.series(), [], {}
    journal = Journal(checkout) if checkout else None
    following = next_files(lock, next_directory) if next_directory else None
    if checkout and checkout.version == lock.next:
        if following is None:
            raise OverlayError(FAILED, f"{checkout.root}: give a git directory that has its commit")
        return _refresh_next(patchset, following, only_check, journal, into)

    def upstream_at(version: str) -> Original:
        sdist = upstream(lock, version, patchset.root)
        return lambda path: sdist[path] if path in sdist else journal and journal.read(path)

    patched = series.build(patches, upstream_at(lock.pin), lock.git_only)
    for one in patched:
        if one.left_out and sha256(patches[one.name]) != lock.patches.get(one.name):
            what = f"patches/{one.name} was edited: refresh with a git checkout, which has"
            raise OverlayError(FAILED, f"{what} {', '.join(git.paths_of(one.diff))}")
    if checkout:
        sdist = upstream(lock, lock.pin, patchset.root)
        owners = _take_edits(patchset, journal, patched, into, sdist)
        lines = [f"{len(owners)} edited", *owners]
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
    own = patchset.own()
    if following:
        own_texts = _lock_next(patchset, with_own(texts, own), following)
    else:
        lines += _notice_stale(patchset, with_own(texts, own), only_check)
        own_texts = own
    lines += _write(patchset, patches | own, texts | own_texts, only_check)
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
    sdist: dict[str, bytes],
) -> dict[str, int]:
    """Put the edits of a checkout of the pin, or of the next version, into the patches; return the
    index of the patch that took each.

    sdist: upstream's files of that version.
    """
    checkout, lock = journal.checkout, patchset.lock
    check_version(checkout.root, checkout.version, [lock.pin, *[lock.next] * bool(lock.next)])
    applied = series.last_tree(patched)

    def original(path: str) -> bytes | None:
        return sdist[path] if path in sdist else journal.read(path)

    for path, data in applied.items():
        known = journal.paths.get(path)
        if known is None and path not in sdist:
            continue  # its patch is new, or was left out
        if not known or known.states[-1] != sha256(data):
            what = f"{checkout.root} has not the present patches applied (see {path})"
            raise OverlayError(FAILED, what)
    # A git checkout has other files than the sdist. They count only where a patch is applied.
    named = [of for _, _, of in (one.partition(":") for one in into)]
    paths = [path for path in sdist if path.startswith("megatron/") or path in [*applied, *named]]
    paths = [path for path in paths if path.endswith(".py")]
    paths += [path for path in applied if path not in sdist and path in journal.paths]
    edits = {path: checkout.read(path) for path in paths if path not in patchset.overlay}
    before = {path: applied.get(path, original(path)) for path in edits}
    edits = {path: data for path, data in edits.items() if data not in (None, before[path])}
    owners = {path: _owner(patched, path, into) for path in edits}
    for path, edited in edits.items():
        series.carry(patched, owners[path], path, before[path], edited, original)
    return owners


def _owner(patched: list[Patched], path: str, into: Collection[str]) -> int:
    """Return the index of the patch that an edit of ``path`` belongs to.

    It is the one that ``into`` names for this path or for all, else the only one that touches it.
    """
    named = [number for number, _, of in (i.partition(":") for i in into) if of in ("", path)]
    if named:
        found = [i for i, one in enumerate(patched) if _file(one).startswith(f"{named[-1]}-")]
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
    for version in [version for version in lock.versions if version != lock.next]:
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
    kept = {lock.next: lock.files[lock.next]} if lock.next in lock.files else {}
    lock.files, lock.git_only = files | kept, git_only


def _file(one: Patched) -> str:
    return one.name.rpartition("/")[2]


def _refresh_next(
    patchset: PatchSet,
    tree: dict[str, bytes],
    only_check: bool,
    journal: Journal,
    into: Collection[str],
) -> list[str]:
    """Take the edits of a checkout of the next version: a patch that takes one becomes its own."""
    patches, own = patchset.series(patchset.lock.next), patchset.own()
    patched = series.build(patches, tree.get)
    owners = _take_edits(patchset, journal, patched, into, tree)
    for one in (patched[index] for index in owners.values()):
        one.name = f"{NEXT}/{_file(one)}"
        own[one.name] = one.text() or one.header
    base = patchset.series()
    texts = base | _lock_next(patchset, with_own(base, own), tree)
    lines = [f"{len(owners)} edited", *owners]
    lines += _write(patchset, base | patchset.own(), texts, only_check)
    _adopt(patchset, journal.checkout, patched)
    return lines


def _lock_next(patchset: PatchSet, patches: Texts, tree: dict[str, bytes]) -> Texts:
    """Update the next version's part of the lock; return the canonical texts of its own patches.

    tree: its files.
    """
    lock = patchset.lock
    try:
        patched = series.build(patches, tree.get)
    except OverlayError as error:
        raise OverlayError(FAILED, f"on {lock.next}: {error.lines[0]}") from None
    own = {one.name: one.text() or one.header for one in patched if one.name != _file(one)}
    made = series.last_tree(patched)
    made |= {path: ours.read_bytes() for path, ours in patchset.overlay.items() if path in tree}
    lock.files[lock.next] = {p: [sha256(tree[p]), sha256(made[p])] for p in sorted(made)}
    lock.next_patches = {name: sha256(text) for name, text in own.items()}
    digest = patchset.next_digest(with_own(patches, own))
    lock.versions[lock.next] = replace(lock.versions[lock.next], digest=digest)
    return own


def _notice_stale(patchset: PatchSet, patches: Texts, only_check: bool) -> list[str]:
    """Return a line, or refuse, if the next version's part of the lock was made of others."""
    version = patchset.lock.next
    if not version or patchset.next_digest(patches) == patchset.lock.versions[version].digest:
        return []
    line = f"{version} in the lock is stale: refresh with --next GITDIR"
    refuse(FAILED, [line] * only_check)
    return [line]


def _write(patchset: PatchSet, patches: Texts, texts: Texts, only_check: bool) -> list[str]:
    folder, files = patchset.patch_dir, texts | {"upstream.toml": patchset.lock.text().encode()}
    present = patches | {"upstream.toml": (folder / "upstream.toml").read_bytes()}
    stale = [name for name, text in files.items() if present.get(name) != text]
    gone = [name for name in patches if name not in files]
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
