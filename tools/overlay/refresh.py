# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Write the canonical patches and the lock, or check them.

Upstream's files come from the archives in ``build/cache``; git-only files from the given checkout.
What is not at hand stays as it is: patches and rows of the lock of git-only files, without a
checkout that has them, and the table of the next version, unless its commit was fetched.
"""

from dataclasses import replace

from overlay import git, series
from overlay.apply import Application
from overlay.checkout import Checkout, sha256
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

    def run(self, only_check: bool) -> list[str]:
        """Bring patches and lock to their canonical form; return the lines to print.

        The checkout's edits go into the last patch of their file, or else into the patch that has a
        header only; the checkout then has the new patches applied.

        Raises:
            OverlayError: the patch set is inconsistent; or, with ``only_check``, not canonical.
        """
        before, edited = dict(self.patchset.texts), self._take_edits() if self.checkout else []
        self.lock.files = {version: self._table(version) for version in self.lock.versions}
        lines = [f"{len(edited)} edited", *edited] if self.checkout else []
        lines += self._write(before, only_check)
        if edited:
            lines += Application(self.patchset, self.journal).apply(link=False, only_check=False)
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

    def _take_edits(self) -> list[str]:
        """Put the edits of a checkout of the pin into patches; return the edited paths."""
        known, edited = self.journal.states, []
        self.checkout.check_version([self.lock.pin])
        if not known:
            return []
        patched, tree, original = self._build(self.lock.pin)
        applied = series.last_tree(patched)
        for path, data in applied.items():
            if path not in known or known[path][-1] != sha256(data):
                what = f"{self.checkout.root} has not the present patches applied (see {path})"
                raise OverlayError(FAILED, what)
        paths = [path for path in tree if path.startswith("megatron/") and path.endswith(".py")]
        for path in sorted({*paths, *applied} - self.patchset.overlay.keys()):
            before, now = applied.get(path, original(path)), self.checkout.read(path)
            if None in (before, now) or before == now:
                continue
            owners = [one for one in patched if path in one.files]
            owners = owners or [one for one in patched if not one.diff]
            if not owners:
                what = "no patch changes it: write the header of one, patches/NNNN-topic.patch"
                raise OverlayError(FAILED, f"{path}: {what}")
            owners[-1].files[path] = owners[-1].files.get(path, [before])[0], now
            known.setdefault(path, [sha256(before)])
            self.journal.originals.setdefault(path, replace(self.checkout.look(path), data=before))
            edited.append(path)
        self._keep(self.lock.pin, patched)
        return edited

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

    def _write(self, before: git.Files, only_check: bool) -> list[str]:
        folder, lock = self.patchset.folder, "upstream.toml"
        before = before | {lock: (folder / lock).read_bytes()}
        after = self.patchset.texts | {lock: self.lock.text().encode()}
        stale = {name: text for name, text in after.items() if before.get(name) != text}
        refuse(FAILED, [f"patches/{name} is stale: run `make lock`" for name in stale] * only_check)
        git.write_files(folder, stale)
        return [f"wrote patches/{name}" for name in stale] or ["patches and lock are up to date"]
