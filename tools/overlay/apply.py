# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""``apply_overlay.sh``: apply, check, status, revert, and the three-way merge, on one checkout.

All changes are computed before anything is written.
"""

import contextlib
import os

from overlay import git, series
from overlay.checkout import Checkout, digest, same, sha256
from overlay.errors import DIFFERS_FROM_LOCK, FAILED, LOCAL_EDITS, OverlayError
from overlay.fetch import upstream
from overlay.patchset import PatchSet, check_version
from overlay.store import Manifest, States, Store


def run(patchset: PatchSet, checkout: Checkout, how: str | None) -> tuple[list[str], int]:
    """Apply, or do what ``how`` says, the name of a flag; return the lines to print, and the exit
    code."""
    store, only_looks = Store(checkout), how in ("check", "status")
    with contextlib.nullcontext() if only_looks else store.locked():
        one = Application(patchset, checkout, store)
        if how != "three-way" and not (one.old and how in ("revert", "status")):
            check_version(checkout.root, checkout.version, patchset.lock.locked)
        if how == "three-way":
            done, left = one.three_way()
            return [done, *one.notices, *left], FAILED if left else 0
        if how == "revert":
            return one.revert(), 0
        lines = one.status() if how == "status" else one.apply(how == "link", how == "check")
        return lines + one.notices, 0


class Application:
    """The present patch set and the present checkout, and the ways from one state to another."""

    def __init__(self, patchset: PatchSet, checkout: Checkout, store: Store):
        self.patchset, self.checkout, self.store = patchset, checkout, store
        self.lock, self.overlay = patchset.lock, patchset.overlay
        self.old = self.store.manifest()
        self.known = self.old.files if self.old else {}
        self.notices: list[str] = []
        self._now: States = {}
        self._before: States = {}  # states before the overlay was first applied
        self._merging = False

    @property
    def _locked(self) -> dict[str, tuple[str, str]]:
        return {} if self._merging else self.lock.changed_in(self.checkout.version)

    def apply(self, link: bool, only_check: bool = False) -> list[str]:
        """Bring the checkout to the present state of the patch set; links stay links."""
        self.patchset.check_against_lock()
        self._look({*self._locked, *self.overlay, *self.known})
        differ = [path for path, (want, _) in self._locked.items() if self._sha(path) != want]
        _refuse(DIFFERS_FROM_LOCK, "{}", [self._why_it_differs(path) for path in differ])
        patched = {p: sha for p, (_, sha) in self._locked.items() if self.lock.is_patched(p)}
        new = self._plan(link, patched, self.checkout.version)
        changes = self._changes(new)
        if not changes and self.old == new:
            return ["already applied"]
        if only_check:
            return [f"would change {_count(changes)}", *changes]
        tree = self._patched(self._original) if patched.keys() & changes else {}
        return [self._move(new, tree)]

    def three_way(self) -> tuple[str, list[str]]:
        """Merge the patch set into a git tree that differs from the lock.

        Return what was done, and what is left to do by hand.
        """
        self.patchset.check_against_lock()
        self._merging = True
        self._leave_out("a three-way merge has no base for it")
        version = self.checkout.version
        version = version if version in self.lock.locked else self.lock.pin
        tree, notes = self._merge(version)
        new = self._plan(False, {path: sha256(data) for path, data in tree.items()}, version)
        return self._move(new, tree), notes

    def revert(self) -> list[str]:
        """Restore the originals, byte for byte."""
        if self.old is None:
            return ["not applied"]
        self._look(self.known)
        self._refuse_edits({})
        return [self._move(None, {}).replace("updated", "reverted")]

    def status(self) -> list[str]:
        """Return one of applied, not applied, modified since, partly applied; then the files."""
        self._look({*self.known, *self._locked}, strict=False)
        now, locked = self._now, self._locked
        if self.old is None:
            files = sorted(locked.items())
            if patched := [path for path, (_, after) in files if digest(now[path]) == after]:
                return ["partly applied: patched files without their originals", *patched]
            if differ := [path for path, (before, _) in files if digest(now[path]) != before]:
                return ["not applied: files differ from the lock", *differ]
            return ["not applied"]
        files = sorted(self.known.items())
        if edited := [path for path, states in files if not same(now[path], None, *states)]:
            return ["modified since", *edited]
        if lost := [path for path, states in files if not same(now[path], states[-1])]:
            return ["partly applied: apply again to repair", *lost]
        merged = [p for p, s in files if p in locked and digest(s[0]) != locked[p][0]]
        if merged or not locked:
            return [f"applied: merged from the patches for {self.old.version}"]
        if self.apply(False, only_check=True) == ["already applied"]:
            return [f"applied: {_count(files)}"]
        return ["applied: an earlier state of the patch set; apply again to update"]

    def _look(self, paths, strict: bool = True) -> None:
        """Record the state of every path; refuse all paths behind symlinks in one error.

        Leave out the patches of git-only files if one of these files is not as locked.
        """
        self._now, refused = dict.fromkeys(sorted(paths)), {}
        for path in self._now:
            try:
                self._now[path] = self.checkout.look(path)
            except OverlayError as error:
                if error.code != DIFFERS_FROM_LOCK:
                    raise
                refused |= dict.fromkeys(error.lines)
        _refuse(DIFFERS_FROM_LOCK, "{}", refused if strict else ())
        self._before = self._now | {path: states[0] for path, states in self.known.items()}
        for path in self.lock.git_only():
            if self._sha(path) not in self._locked[path]:
                why = "has been changed" if self._before.get(path) else "is not in this tree"
                return self._leave_out(f"{path} {why}")

    def _leave_out(self, why: str) -> None:
        """Go on as if the lock had no git-only files."""
        if names := sorted(self.lock.git_only_patches()):
            self.lock = self.lock.without_git_only()
            self.notices = [f"left out: {', '.join(names)}: {why}"]

    def _plan(self, link: bool, patched: dict[str, str], version: str) -> Manifest:
        """Return the final manifest.

        If an earlier state of the patch set is applied, the new one starts from the originals.

        Args:
            patched: sha256 of each file after the patches, which are for ``version``.

        Raises:
            OverlayError: local edits would be lost.
        """
        link = link or any((states[-1] or "").startswith("link ") for states in self.known.values())
        ours = {path: sha256(source.read_bytes()) for path, source in self.overlay.items()}
        wanted: States = {}
        for path, sha in (patched | ours).items():
            before, source = self._before[path], self.overlay.get(path)
            mode = "755" if source and os.access(source, os.X_OK) else "644"
            mode = before.partition(" ")[0] if digest(before) else mode
            wanted[path] = f"link {source}" if source and link else f"{mode} {sha}"
        self._refuse_edits(wanted)
        foreign = [path for path in self.overlay if path not in {*self.known, *self._locked}]
        foreign = [path for path in foreign if not same(self._now[path], None, wanted[path])]
        foreign = [path for path in foreign if not self._is_committed(path)]
        message = "{} exists and is not ours: an overlay file would replace it"
        _refuse(LOCAL_EDITS, message, foreign)
        return Manifest(version, {path: [self._before[path], wanted[path]] for path in wanted})

    def _refuse_edits(self, wanted: States) -> None:
        ours = {path: [None, *states, wanted.get(path)] for path, states in self.known.items()}
        edited = [path for path, states in ours.items() if not same(self._now[path], *states)]
        _refuse(LOCAL_EDITS, "{} was edited since the overlay was applied", edited)

    def _sha(self, path: str) -> str | None:
        """Return the sha256 of a file as it was before the overlay."""
        return digest(self._before.get(path))

    def _why_it_differs(self, path: str) -> str:
        if self._now[path] is None:
            return f"{path} is missing"
        if digest(self._now[path]) == self._locked[path][1]:
            return f"{path} is patched already, but its original is lost: restore it or fetch anew"
        return f"{path} differs from the lock"

    def _original(self, path: str) -> bytes | None:
        """Return the file as it was before the overlay, None if there was no regular one."""
        return self.store.original(path, self.old or Manifest("", {}))

    def _is_committed(self, path: str) -> bool:
        """Return whether a file's original is committed: in the version, or before a merge in HEAD.

        Then an overlay file may replace it, and --revert restores it.
        """
        if (data := self._original(path)) is None:
            return False
        version = self.lock.versions.get(self.checkout.version)
        revision = "HEAD" if self._merging else version.commit or version.tag
        return git.is_committed(self.checkout.root, revision, path, data)

    def _changes(self, new: Manifest | None) -> dict[str, str | None]:
        """Return the state of each path that changes when ``new`` is applied."""
        ends = sorted(self.store.ends(new).items())
        return {path: state for path, state in ends if not same(self._now[path], state)}

    def _patched(self, original: series.Original) -> dict[str, bytes]:
        """Return upstream's files with the patches that are not left out."""
        patches = self.patchset.series()
        patches = {name: patches[name] for name in self.lock.patches}
        return series.last_tree(series.build(patches, original, self.store.scratch()))

    def _move(self, new: Manifest | None, tree: dict[str, bytes]) -> str:
        """Change all paths; ``tree`` has the patched files."""
        changes, contents = self._changes(new), {}
        for path, sha in {path: digest(state) for path, state in changes.items()}.items():
            if sha:
                ours = self.overlay.get(path)
                if new is None or path not in new.files:
                    contents[path] = self._original(path)
                else:
                    contents[path] = ours.read_bytes() if ours else tree[path]
                if sha256(contents[path]) != sha:
                    what = f"{path}: the patches give another file than the lock"
                    raise OverlayError(FAILED, what)
        self.store.move(new, contents)
        return f"{'updated' if self.old else 'applied'}: {_count(changes)} changed"

    def _merge(self, version: str) -> tuple[dict[str, bytes], list[str]]:
        """Merge every patched file; return the files, and notes on what is left to do.

        Base is the file of ``version``, ours is the last commit's file, theirs is the base with all
        patches.
        """
        original = upstream(self.lock, version, self.patchset.root).get
        theirs = self._patched(original)
        self._look({*theirs, *self.overlay, *self.known})
        present = sorted(path for path in {*theirs, *self.overlay} if self._before[path])
        message = "{} is not as this git tree's last commit has it: commit first"
        _refuse(LOCAL_EDITS, message, [path for path in present if not self._is_committed(path)])
        files, notes = {}, []
        for path in sorted(self.overlay):
            # The sdist lacks the examples that a git tree has.
            if self._original(path) != original(path) and path.startswith("megatron/"):
                notes.append(f"review: {path} is ours, and not what upstream has in {version}")
        for path in sorted(theirs):
            by = ", ".join(name[:4] for name in self.lock.files[path].by)
            if (ours := self._original(path)) is None:
                notes.append(f"gone: {path}, which {by} changed")
                continue
            labels = ["-L", "this tree", "-L", version, "-L", f"patches {by}"]
            sides = ours, original(path), theirs[path]
            files[path], clean = git.merge(*sides, *labels, scratch=self.store.scratch())
            notes += [] if clean else [f"conflict: {path} with {by}"]
        return files, notes


def _refuse(code: int, message: str, paths) -> None:
    """Raise OverlayError with a line for each path, if there are any."""
    if paths:
        raise OverlayError(code, *map(message.format, paths))


def _count(paths) -> str:
    return f"{len(paths)} file{'s' * (len(paths) != 1)}"
