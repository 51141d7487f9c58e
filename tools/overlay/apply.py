# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""``apply_overlay.sh``: apply, check, status and revert on one checkout.

All changes are computed before anything is written.
"""

import os
from collections.abc import Collection

from overlay import git, series
from overlay.checkout import LINK, Checkout, Entry, sha256, state
from overlay.errors import DIFFERS_FROM_LOCK, FAILED, LOCAL_EDITS, refuse
from overlay.journal import Journal, alone
from overlay.patchset import PatchSet

Goal = dict[str, Entry]  # what our paths get


def run(patchset: PatchSet, checkout: Checkout, how: str | None) -> list[str]:
    """Apply, or do what ``how`` says, the name of a flag; return the lines to print."""
    with alone(checkout):
        one = Application(patchset, Journal(checkout))
        if how == "status":
            return one.status()
        return one.revert() if how == "revert" else one.apply(how == "link", how == "check")


class Application:
    """The present patch set and the present checkout, and the ways from one state to another."""

    def __init__(self, patchset: PatchSet, journal: Journal):
        self.patchset, self.journal, self.checkout = patchset, journal, journal.checkout
        self.states = journal.states

    def apply(self, link: bool, only_check: bool) -> list[str]:
        """Bring the checkout to the present state of the patch set; links stay links."""
        goal, notices = self._goal(link)
        changes, wanted = self.journal.changes(goal), {p: [state(e)] for p, e in goal.items()}
        if not changes and self.states == wanted:
            return ["already applied", *notices]
        if only_check:
            return [f"would change {_count(changes)}", *changes, *notices]
        done = f"{'updated' if self.states else 'applied'}: {_count(changes)} changed"
        self.journal.move(goal)
        return [done, *notices]

    def revert(self) -> list[str]:
        """Restore the originals, byte for byte."""
        self._refuse_edits()
        done = f"reverted: {_count(self.journal.changes({}))} changed"
        done = done if self.states else "not applied"
        self.journal.move({})
        return [done]

    def status(self) -> list[str]:
        """Return one of applied, not applied, modified since, partly applied; then the files."""
        if edited := self._edits():
            return ["modified since", *edited]
        if lost := [path for path, known in self.states.items() if self._now(path) != known[-1]]:
            return ["partly applied: apply again to repair", *lost]
        if self.states:
            return [f"applied: {_count(self.states)}"]
        self.checkout.check_version(self.patchset.lock.files)
        return ["not applied"]

    def _goal(self, link: bool = False) -> tuple[Goal, list[str]]:
        """Return what our paths get, and notices of patches that are left out.

        Raises:
            OverlayError: the checkout differs from the lock, or local edits would be lost.
        """
        contents, notices = self._contents()
        link = link or any(known[-1].startswith(LINK) for known in self.states.values())
        goal = {path: Entry(d, self.journal.before(path).mode) for path, d in contents.items()}
        goal |= {path: self._ours(path, link) for path in self.patchset.overlay}
        self._refuse_edits()
        locked = self.patchset.lock.files[self.checkout.version]
        new = goal.keys() - self.states.keys() - locked.keys()
        foreign = [p for p in sorted(new) if self._now(p) not in (None, state(goal[p]))]
        refuse(LOCAL_EDITS, [f"{path} exists, and is not ours" for path in foreign])
        return goal, notices

    def _contents(self) -> tuple[git.Files, list[str]]:
        """Return what the patches make of upstream's files, and notices of those left out."""
        lock, version, read = self.patchset.lock, self.checkout.version, self.journal.read
        self.checkout.check_version(lock.files)
        table = {
            path: sides
            for path, sides in lock.files[version].items()
            if read(path) is not None or not series.is_git_only(path)
        }
        wrong = [path for path, (sha, _) in table.items() if sha256(read(path) or b"") != sha]
        what = "differs from the lock, as git diff shows: restore it or fetch anew"
        refuse(DIFFERS_FROM_LOCK, [f"{path} {what}" for path in wrong])
        patched, notices = series.build(self.patchset.series(version), read), []
        refuse(FAILED, [one.problem for one in patched if one.problem])
        for one in [one for one in patched if one.left_out]:
            paths = git.paths_of(one.diff)
            absent = " or ".join(path for path in paths if read(path) is None)
            notices.append(f"left out: {one.name}: only git checkouts have {absent}")
            table = {path: sides for path, sides in table.items() if path not in paths}
        contents, overlay = series.last_tree(patched), self.patchset.overlay
        made = contents | {path: overlay[path].read_bytes() for path in overlay.keys() & table}
        made = {path: sha256(data) for path, data in made.items()}
        wanted = {path: after for path, (_, after) in table.items()}
        stale = [path for path in sorted(made | wanted) if made.get(path) != wanted.get(path)]
        refuse(FAILED, [f"{path} differs from the lock: run `make lock`" for path in stale])
        return contents, notices

    def _ours(self, path: str, link: bool) -> Entry:
        source, before = self.patchset.overlay[path], self.journal.before(path)
        if link:
            return Entry(os.fsencode(source), LINK)
        mode = "755" if os.access(source, os.X_OK) else "644"
        return Entry(source.read_bytes(), before.mode if before and before.mode != LINK else mode)

    def _refuse_edits(self) -> None:
        what = "was edited since the overlay was applied"
        cure = "copy what you want to keep, delete the file, and try again"
        refuse(LOCAL_EDITS, [f"{path} {what}: {cure}" for path in self._edits()])

    def _edits(self) -> list[str]:
        """Return the paths of ours that are neither as we left them nor as they were before."""
        before = {path: state(entry) for path, entry in self.journal.originals.items()}
        known = self.states.items()
        return [path for path, own in known if self._now(path) not in (None, before[path], *own)]

    def _now(self, path: str) -> str | None:
        return state(self.checkout.look(path))


def _count(paths: Collection) -> str:
    return f"{len(paths)} file{'s' * (len(paths) != 1)}"
