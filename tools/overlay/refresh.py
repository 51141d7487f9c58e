# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Write the canonical patches and the lock, or check them.

Upstream's files come from the archives in ``build/cache``; git-only files from the given checkout.
What is not at hand stays as it is: patches and rows of the lock of git-only files, without a
checkout that has them, and the table of the next version, unless its commit was fetched.
"""

from collections.abc import Collection
from dataclasses import replace

from overlay import git, series
from overlay.checkout import Checkout, sha256, state
from overlay.errors import FAILED, OverlayError, refuse
from overlay.fetch import upstream
from overlay.journal import Journal
from overlay.patchset import NEXT, PatchSet
from overlay.series import Patched


def refresh(
    patchset: PatchSet,
    checkout: Checkout | None = None,
    into: Collection[str] = (),
    pin: str | None = None,
    only_check: bool = False,
) -> list[str]:
    """Bring patches and lock to their canonical form; return the lines to print.

    Args:
        checkout: its edits go into the patches that ``into`` names, or that own the files.
        pin: the version to which the patches are carried.

    Raises:
        OverlayError: the patch set is inconsistent; or, with ``only_check``, not in canonical form.
    """
    one, lock = Refresh(patchset, checkout), patchset.lock
    lines = one.take_edits(into) if checkout else one.move_pin(pin) if pin else []
    lock.files = {version: one.table(version) for version in lock.versions}
    lines += one.write(only_check)
    one.adopt()
    return lines


class Refresh:
    """A run of refresh. It changes ``patchset`` in memory, and writes at its end."""

    def __init__(self, patchset: PatchSet, checkout: Checkout | None):
        self.patchset, self.lock, self.checkout = patchset, patchset.lock, checkout
        self.journal = Journal(checkout) if checkout else None
        self.before = dict(patchset.texts)
        self.edited: list[Patched] = []

    def _upstream(self, version: str) -> tuple[git.Files, series.Original]:
        """Return the files of a version, and a function that also reads those of the checkout."""
        tree = upstream(self.lock, version, self.patchset.root)
        if tree is None:
            raise OverlayError(FAILED, f"{version} is not in build/cache: fetch it with --next")
        is_of_main = self.journal and self.checkout.version == self.lock.next
        beside = self.journal.read if self.journal and not is_of_main else {}.get
        return tree, lambda path: tree[path] if path in tree else beside(path)

    def _build(self, version: str) -> list[Patched]:
        try:
            return series.build(self.patchset.series(version), self._upstream(version)[1])
        except OverlayError as error:
            raise OverlayError(FAILED, f"on {version}: {error.lines[0]}") from None

    def _keep(self, version: str, patched: list[Patched]) -> None:
        """Keep the canonical texts of the patches that are made for a version."""
        own = {self.lock.pin: "", self.lock.next: NEXT}.get(version, "no patch")
        self.patchset.texts |= {p.name: p.text() for p in patched if p.name.startswith(own)}

    def take_edits(self, into: Collection[str]) -> list[str]:
        """Put the edits of the checkout into patches, on the next version into its own."""
        known, version, edits = self.journal.states, self.checkout.version, []
        self.checkout.check_version([one for one in (self.lock.pin, self.lock.next) if one])
        if not known:
            return ["0 edited: nothing is applied"]
        patched, (tree, original) = self._build(version), self._upstream(version)
        applied = series.last_tree(patched)
        for path, data in applied.items():
            if path not in known or known[path][-1] != sha256(data):
                what = f"{self.checkout.root} has not the present patches applied (see {path})"
                raise OverlayError(FAILED, what)
        named = {path: number for number, _, path in (one.partition(":") for one in into)}
        paths = [path for path in tree if path.startswith("megatron/") and path.endswith(".py")]
        for path in sorted({*paths, *applied, *named} - self.patchset.overlay.keys()):
            before, now = applied.get(path, original(path)), self.checkout.read(path)
            if None not in (before, now) and before != now:
                owner = _owner(patched, path, named.get(path))
                series.carry(patched, patched.index(owner), path, before, now, original(path))
                if version == self.lock.next:
                    owner.name = NEXT + owner.name.removeprefix(NEXT)
                edits.append(path)
        self.edited = patched
        self._keep(version, patched)
        return [f"{len(edits)} edited", *edits]

    def move_pin(self, pin: str) -> list[str]:
        """Carry the patches to another version of the lock, which takes the pin's place."""
        lock = self.lock
        if pin not in lock.versions:
            raise OverlayError(FAILED, f"the lock has no version {pin}: add it first")
        ported = series.port(self._build(lock.pin), self._upstream(pin)[1], {})
        if pin != lock.pin:
            del lock.versions[lock.pin]
            lock.files[pin] = lock.files.pop(lock.pin) | lock.files.get(pin, {})
        lock.pin = pin
        self._keep(pin, [one for one, _, _ in ported])
        return [f"conflict: {path} with {one.name}" for one, _, paths in ported for path in paths]

    def table(self, version: str) -> dict[str, list[str]]:
        """Return a version's table, and keep the patches that are made for it."""
        lock, overlay = self.lock, self.patchset.overlay
        old = lock.files.get(version, {})
        if version == lock.next and upstream(lock, version, self.patchset.root) is None:
            return old
        patched, (tree, original) = self._build(version), self._upstream(version)
        self._keep(version, patched)
        made = series.last_tree(patched)
        twice = sorted(made.keys() & overlay)
        refuse(FAILED, [f"{path} is both an overlay file and patched" for path in twice])
        made |= {path: ours.read_bytes() for path, ours in overlay.items() if path in tree}
        table = {path: [sha256(original(path)), sha256(data)] for path, data in made.items()}
        known = lock.files.get(lock.pin, {}) | old
        for path in [path for one in patched if one.left_out for path in git.paths_of(one.diff)]:
            if path not in known:
                raise OverlayError(FAILED, f"refresh with a git checkout, which has {path}")
            table[path] = known[path]
        return dict(sorted(table.items()))

    def write(self, only_check: bool) -> list[str]:
        folder, lock = self.patchset.folder, "upstream.toml"
        before = self.before | {lock: (folder / lock).read_bytes()}
        after = self.patchset.texts | {lock: self.lock.text().encode()}
        stale = {name: text for name, text in after.items() if before.get(name) != text}
        refuse(FAILED, [f"patches/{name} is stale: run `make lock`" for name in stale] * only_check)
        git.write_files(folder, stale)
        return [f"wrote patches/{name}" for name in stale] or ["patches and lock are up to date"]

    def adopt(self) -> None:
        """Record in the journal that the files of the edited checkout are those of the new lock."""
        if not self.edited:
            return
        before, last = series.originals(self.edited), series.last_tree(self.edited)
        known, states, overlay = self.journal.originals, self.journal.states, self.patchset.overlay
        originals = {path: one for path, one in known.items() if path in overlay}
        for path in (path for path, data in before.items() if data != last[path]):
            now = self.checkout.look(path)
            originals[path] = known.get(path) or replace(now, data=before[path])
            states[path] = [state(now)]
        self.journal.write(originals, states)


def _owner(patched: list[Patched], path: str, number: str | None) -> Patched:
    """Return the patch that an edit of ``path`` belongs to.

    It is the one with the number, if there is one, else the only one that touches the file.
    """
    if number:
        is_it = [one.name.removeprefix(NEXT).startswith(f"{number}-") for one in patched]
        if True not in is_it:
            raise OverlayError(FAILED, f"--into {number}: no patches/{number}-*.patch")
        return patched[is_it.index(True)]
    found = [one for one in patched if path in one.files]
    if len(found) != 1:
        names = ", ".join(one.name for one in found) or "no patch"
        raise OverlayError(FAILED, f"{path} belongs to {names}: name one with --into NNNN:{path}")
    return found[0]
