# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""``apply_overlay.sh``: apply, check, status and revert on one checkout.

All changes are computed before anything is written.
"""

import os
from collections.abc import Collection

from overlay import git, series
from overlay.checkout import LINK, Checkout, Entry, state
from overlay.errors import LOCAL_EDITS, NOT_THE_PIN, OverlayError, refuse
from overlay.journal import Journal
from overlay.patchset import PatchSet, check_version

Goal = dict[str, Entry]  # what our paths get


def run(patchset: PatchSet, checkout: Checkout, how: str | None) -> list[str]:
    """Apply, or do what ``how`` says, the name of a flag; return the lines to print."""
    if how in ("check", "status"):
        one = Application(patchset, checkout, Journal(checkout))
        return one.status() if how == "status" else one.apply(only_check=True)
    with Journal.locked(checkout) as journal:
        one = Application(patchset, checkout, journal)
        return one.revert() if how == "revert" else one.apply(how == "link")


class Application:
    """The present patch set and the present checkout, and the ways from one state to another."""

    def __init__(self, patchset: PatchSet, checkout: Checkout, journal: Journal):
        self.patchset, self.checkout, self.journal = patchset, checkout, journal
        self.known = journal.paths

    def apply(self, link: bool = False, only_check: bool = False) -> list[str]:
        """Bring the checkout to the present state of the patch set; links stay links."""
        goal, notices = self._goal(link)
        if self.journal.has(goal):
            return ["already applied", *notices]
        changes = self._changes(goal)
        if only_check:
            return [f"would change {_count(changes)}", *changes, *notices]
        done = f"{'updated' if self.known else 'applied'}: {_count(changes)} changed"
        self.journal.move(goal)
        return [done, *notices]

    def revert(self) -> list[str]:
        """Restore the originals, byte for byte."""
        if not self.known:
            return ["not applied"]
        self._refuse_edits({})
        done = f"reverted: {_count(self._changes({}))} changed"
        self.journal.move({})
        return [done]

    def status(self) -> list[str]:
        """Return one of applied, not applied, modified since, partly applied; then the files."""
        if edited := self._edits({}):
            return ["modified since", *edited]
        states = {path: known.states[-1] for path, known in self.known.items()}
        if lost := [path for path, last in states.items() if self._now(path) != last]:
            return ["partly applied: apply again to repair", *lost]
        first = f"applied: {_count(states)}" if states else "not applied"
        try:
            goal, notices = self._goal()
        except OverlayError as refusal:
            if refusal.code == NOT_THE_PIN and not states:
                raise
            return [first, *refusal.lines]
        if states and not self.journal.has(goal):
            first = "applied: an earlier state of the patch set; apply again to update"
        return [first, *notices]

    def _goal(self, link: bool = False) -> tuple[Goal, list[str]]:
        """Return what our paths get, and notices of patches that are left out.

        Raises:
            OverlayError: the checkout differs from the lock, or local edits would be lost.
        """
        locked, version = self.patchset.lock.files, self.checkout.version
        check_version(self.checkout.root, version, locked)
        patched, notices = self.patchset.patched_on(version, self.journal.read), []
        for one in [one for one in patched if one.left_out]:
            paths = git.paths_of(one.diff)
            absent = [path for path in paths if self.journal.read(path) is None]
            why = "only git checkouts have" if absent else "this tree has changed"
            notices.append(f"left out: {one.name}: {why} {' or '.join(absent or paths)}")
        link = link or any(known.states[-1].startswith(LINK) for known in self.known.values())
        contents = series.last_tree(patched)
        goal = {path: Entry(d, self.journal.before(path).mode) for path, d in contents.items()}
        goal |= {path: self._ours(path, link) for path in self.patchset.overlay}
        self._refuse_edits(goal)
        checked = {*self.known, *contents, *locked[version]}
        foreign = [path for path in goal if path not in checked and self._is_lost(path, goal)]
        what = "exists, and is neither ours nor committed"
        refuse(LOCAL_EDITS, [f"{path} {what}" for path in foreign])
        return goal, notices

    def _ours(self, path: str, link: bool) -> Entry:
        source, before = self.patchset.overlay[path], self.journal.before(path)
        if link:
            return Entry(os.fsencode(source), LINK)
        mode = "755" if os.access(source, os.X_OK) else "644"
        return Entry(source.read_bytes(), before.mode if before and before.is_file else mode)

    def _is_lost(self, path: str, goal: Goal) -> bool:
        """Return whether an entry that is not committed would be replaced."""
        if self._now(path) in (None, goal[path].state):
            return False
        data = self.checkout.read(path)
        return data is None or not git.is_committed(self.checkout.root, path, data)

    def _refuse_edits(self, goal: Goal) -> None:
        what = "was edited since the overlay was applied"
        cure = "copy what you want to keep, delete the file, and try again"
        refuse(LOCAL_EDITS, [f"{path} {what}: {cure}" for path in self._edits(goal)])

    def _edits(self, goal: Goal) -> list[str]:
        """Return the paths of ours that are neither as we left them nor as they were before."""
        expected = {
            path: {None, state(known.original), *known.states, state(goal.get(path))}
            for path, known in self.known.items()
        }
        return [path for path, states in expected.items() if self._now(path) not in states]

    def _changes(self, goal: Goal) -> list[str]:
        targets = sorted(self.journal.targets(goal).items())
        return [path for path, target in targets if self._now(path) != state(target)]

    def _now(self, path: str) -> str | None:
        return state(self.checkout.look(path))


def _count(paths: Collection) -> str:
    return f"{len(paths)} file{'s' * (len(paths) != 1)}"
