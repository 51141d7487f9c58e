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


class Refresh:
    """A run of refresh. It changes ``patchset`` in memory, and writes at its end."""

    def __init__(self, patchset: PatchSet, checkout: Checkout | None):
        self.patchset, self.lock, self.checkout = patchset, patchset.lock, checkout
        self.journal = Journal(checkout) if checkout else None
        self.before = dict(patchset.texts)
        self.edited: list[Patched] = []

    def run(self, into: Collection[str], only_check: bool) -> list[str]:
        """Bring patches and lock to their canonical form; return the lines to print.

        The checkout's edits go into the patches that ``into`` names, or that own the files.

        Raises:
            OverlayError: the patch set is inconsistent; or, with ``only_check``, not canonical.
        """
        lines = self._take_edits(into) if self.checkout else []
        self.lock.files = {version: self._table(version) for version in self.lock.versions}
        lines += self._write(only_check)
        self._adopt()
        return lines

    def _build(self, version: str) -> tuple[list[Patched], git.Files, series.Original]:
        """Return a version's patches and files, and a function that also reads the checkout's."""
        tree = upstream(self.lock, version, self.patchset.root)
        is_of_main = self.journal and self.checkout.version == self.lock.next
        beside = self.journal.read if self.journal and not is_of_main else {}.get

        def original(path: str) -> bytes | None:
            return tree[path] if path in tree else beside(path)

        try:
            patched = series.build(self.patchset.series(version), original)
        except OverlayError as error:
            raise OverlayError(FAILED, f"on {version}: {error.lines[0]}") from None
        return patched, tree, original

    def _keep(self, version: str, patched: list[Patched]) -> None:
        """Keep the canonical texts of the patches that are made for a version."""
        own = {self.lock.pin: "", self.lock.next: NEXT}.get(version, "no patch")
        self.patchset.texts |= {p.name: p.text() for p in patched if p.name.startswith(own)}

    def _take_edits(self, into: Collection[str]) -> list[str]:
        """Put the edits of a checkout of the pin into patches."""
        known, edits = self.journal.states, []
        self.checkout.check_version([self.lock.pin])
        if not known:
            return ["0 edited: nothing is applied"]
        patched, tree, original = self._build(self.lock.pin)
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
                owner.files[path] = owner.files.get(path, [before])[0], now
                edits.append(path)
        self.edited = patched
        self._keep(self.lock.pin, patched)
        return [f"{len(edits)} edited", *edits]

    def _table(self, version: str) -> dict[str, list[str]]:
        """Return a version's table, and keep the patches that are made for it."""
        lock, overlay = self.lock, self.patchset.overlay
        old = lock.files.get(version, {})
        if version == lock.next and upstream(lock, version, self.patchset.root) is None:
            return old
        patched, tree, original = self._build(version)
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

    def _write(self, only_check: bool) -> list[str]:
        folder, lock = self.patchset.folder, "upstream.toml"
        before = self.before | {lock: (folder / lock).read_bytes()}
        after = self.patchset.texts | {lock: self.lock.text().encode()}
        stale = {name: text for name, text in after.items() if before.get(name) != text}
        refuse(FAILED, [f"patches/{name} is stale: run `make lock`" for name in stale] * only_check)
        git.write_files(folder, stale)
        return [f"wrote patches/{name}" for name in stale] or ["patches and lock are up to date"]

    def _adopt(self) -> None:
        """Record in the journal that the files of the edited checkout are those of the new lock."""
        if not self.edited:
            return
        first = {p: sides[0] for one in reversed(self.edited) for p, sides in one.files.items()}
        last, known, states = series.last_tree(self.edited), self.journal.originals, {}
        originals = {path: one for path, one in known.items() if path in self.patchset.overlay}
        for path in (path for path, data in first.items() if data != last[path]):
            now = self.checkout.look(path)
            originals[path] = known.get(path) or replace(now, data=first[path])
            states[path] = [state(now)]
        self.journal.write(originals, self.journal.states | states)


def _owner(patched: list[Patched], path: str, number: str | None) -> Patched:
    """Return the patch with a number; by default, the last that touches the file.

    Raises:
        OverlayError: there is none, or a later one touches the file.
    """
    touching = [one for one in patched if path in one.files]
    owners = [one for one in patched if one.name.startswith(f"{number}-")] if number else touching
    if not owners:
        what = f"no patches/{number}-*.patch" if number else "no patch changes it"
        raise OverlayError(FAILED, f"{path}: {what}: name one with --into NNNN:{path}")
    if touching and owners[-1].name < touching[-1].name:
        what = f"a later patch changes it, {touching[-1].name}: edit patches/{owners[-1].name}"
        raise OverlayError(FAILED, f"{path}: {what}")
    return owners[-1]
