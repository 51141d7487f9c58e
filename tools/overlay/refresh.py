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
from overlay.series import Original, Step

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

    steps = series.build(patches, upstream_at(lock.pin), lock.git_only)
    for step in steps:
        if step.left_out and sha256(patches[step.name]) != lock.patches.get(step.name):
            what = f"patches/{step.name} was edited: refresh with a git checkout, which has"
            raise OverlayError(FAILED, f"{what} {', '.join(git.paths_of(step.diff))}")
    if checkout:
        lines = _take_edits(patchset, journal, steps, into, upstream_at(lock.pin))
    elif pin:
        steps, conflicts = _move_pin(lock, steps, pin, upstream_at)
        lines = [f"conflict: {path} with {name}" for name in conflicts for path in conflicts[name]]
    texts = {step.name: step.text() for step in steps}
    for step in [step for step in steps if not texts[step.name]]:
        if step.name in conflicts:
            texts[step.name] = step.header
        elif not step.diff:
            raise OverlayError(FAILED, f"patches/{step.name} changes nothing: fill or delete it")
        else:
            del texts[step.name]
            lines.append(f"dropped patches/{step.name}: it changes nothing any more")
    _lock_files(patchset, texts, upstream_at)
    lines += _write(patchset, patches, texts, only_check)
    if checkout:
        _adopt(patchset, checkout, steps)
    return lines


def _move_pin(
    lock: Lock, steps: list[Step], pin: str, upstream_at: Callable[[str], Original]
) -> tuple[list[Step], dict[str, list[str]]]:
    """Carry the patches to another version of the lock, which takes the pin's place.

    Also return the files in which patches conflict; these changes are left out.
    """
    if pin not in lock.versions:
        raise OverlayError(FAILED, f"the lock has no version {pin}: add it first")
    ported = series.port(steps, upstream_at(pin))
    if pin != lock.pin:
        del lock.versions[lock.pin]
    lock.pin = pin
    conflicts = {step.name: paths for step, state, paths in ported if state == "conflicts"}
    return [step for step, _, _ in ported], conflicts


def _take_edits(
    patchset: PatchSet,
    journal: Journal,
    steps: list[Step],
    into: Collection[str],
    original: Original,
) -> list[str]:
    """Put the edits of a checkout of the pin into the steps; return lines that list the edits."""
    checkout, pin = journal.checkout, patchset.lock.pin
    check_version(checkout.root, checkout.version, [pin])
    sdist, applied = upstream(patchset.lock, pin, patchset.root), series.last_tree(steps)
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
    owners = {path: _owner(steps, path, into) for path in edits}
    for path, edited in edits.items():
        series.carry(steps, owners[path], path, before[path], edited, original)
    return [f"{len(edits)} edited", *edits]


def _owner(steps: list[Step], path: str, into: Collection[str]) -> int:
    """Return the index of the patch that an edit of ``path`` belongs to.

    It is the one that ``into`` names for this path or for all, else the only one that touches it.
    """
    named = [number for number, _, of in (i.partition(":") for i in into) if of in ("", path)]
    if named:
        found = [i for i, step in enumerate(steps) if step.name.startswith(f"{named[-1]}-")]
        if not found or steps[found[0]].left_out:
            raise OverlayError(FAILED, f"--into {named[-1]}: no patches/{named[-1]}-*.patch")
        return found[0]
    found = [i for i, step in enumerate(steps) if path in step.files]
    if len(found) != 1:
        names = ", ".join(steps[index].name for index in found) or "no patch"
        raise OverlayError(FAILED, f"{path} belongs to {names}: name one with --into NNNN:{path}")
    return found[0]


def _lock_files(patchset: PatchSet, texts: Texts, upstream_at: Callable[[str], Original]) -> None:
    """Update the lock's tables by applying the patches to every version in it."""
    lock, files, git_only = patchset.lock, {}, {}
    for version in lock.versions:
        sdist, original = upstream(lock, version, patchset.root), upstream_at(version)
        try:
            steps = series.build(texts, original, lock.git_only)
        except OverlayError as error:
            raise OverlayError(FAILED, f"on {version}: {error.lines[0]}") from None
        tree = series.last_tree(steps)
        for step in steps:
            if step.files.keys() - sdist.keys() and step.files.keys() & sdist.keys():
                what = "changes files of the sdist and others: make two patches of it"
                raise OverlayError(FAILED, f"patches/{step.name} {what}")
            for path in git.paths_of(step.diff) if step.left_out else ():
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


def _adopt(patchset: PatchSet, checkout: Checkout, steps: list[Step]) -> None:
    """Record in the checkout's journal that its present files are those of the new lock."""
    with Journal.locked(checkout) as journal:
        paths = {path: known for path, known in journal.paths.items() if path in patchset.overlay}
        for path, data in series.originals(steps).items():
            now = checkout.look(path)
            known = journal.paths.get(path, Known(replace(now, data=data), []))
            paths[path] = Known(known.original, [now.state])
        journal.write(paths)
