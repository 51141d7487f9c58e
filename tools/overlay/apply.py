# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""``apply_overlay.sh``: apply, check, status, revert, and the three-way merge, on one checkout.

All changes are computed before anything is written.
"""

from dataclasses import dataclass

from overlay import git, series
from overlay.checkout import Checkout, digest, regular, same, sha256
from overlay.errors import DIFFERS_FROM_LOCK, FAILED, LOCAL_EDITS, OverlayError
from overlay.fetch import upstream
from overlay.patchset import PatchSet
from overlay.store import Manifest, States, Store


@dataclass
class Merged:
    """Patched files by path, the version that the patches are for, and notes on what is left."""

    files: dict[str, bytes]
    version: str
    notes: list[str]


class Application:
    """The present patch set and the present checkout, and the ways from one state to another."""

    def __init__(self, patchset: PatchSet, checkout: Checkout):
        self.patchset, self.checkout, self.store = patchset, checkout, Store(checkout)
        self.old = self.store.manifest()
        self.known = self.old.files if self.old else {}
        self.locked = patchset.lock.changed_in(checkout.version)
        self.notices: list[str] = []
        self._left_out: set[str] = set()  # patches
        self._now: States = {}
        self._before: States = {}  # states before the overlay was first applied

    def apply(self, link: bool, only_check: bool = False) -> list[str]:
        """Bring the checkout to the present state of the patch set; links stay links."""
        ends, new = self._plan(link)
        changes = [path for path, state in ends.items() if not same(self._now[path], state)]
        if not changes and self.old == new:
            return ["already applied"]
        if only_check:
            return [f"would change {_count(changes)}", *changes]
        tree = {}
        if any(self.patchset.lock.is_patched(path) for path in changes):
            steps = series.build(self._series(), self._original, self.store.scratch())
            tree = series.last_tree(steps)
        return [self._move(new, ends, tree)]

    def _series(self) -> dict[str, bytes]:
        """Return the patches that are not left out."""
        patches = self.patchset.series().items()
        return {name: patch for name, patch in patches if name not in self._left_out}

    def three_way(self) -> tuple[str, list[str]]:
        """Merge the patch set into a git tree that differs from the lock.

        Return what was done, and what is left to do by hand.
        """
        self._leave_out("a three-way merge has no base for it")
        merged = self._merge()
        self.locked = {}
        ends, new = self._plan(False, merged)
        return self._move(new, ends, merged.files), merged.notes

    def revert(self) -> list[str]:
        """Restore the originals, byte for byte."""
        if self.old is None:
            return ["not applied"]
        ends = {path: states[0] for path, states in self.known.items()}
        self._look(ends)
        self._refuse_edits(self.known)
        return [self._move(None, ends, {}).replace("updated", "reverted")]

    def status(self) -> list[str]:
        """Return one of applied, not applied, modified since, partly applied; then the files."""
        self._look({*self.known, *self.locked}, strict=False)
        now = self._now
        if self.old is None:
            locked = sorted(self.locked.items())
            if patched := [path for path, (_, after) in locked if digest(now[path]) == after]:
                return ["partly applied: patched files without their originals", *patched]
            if differ := [path for path, (before, _) in locked if digest(now[path]) != before]:
                return ["not applied: files differ from the lock", *differ]
            return ["not applied"]
        files = sorted(self.known.items())
        if edited := [path for path, states in files if not same(now[path], None, *states)]:
            return ["modified since", *edited]
        if lost := [path for path, states in files if not same(now[path], states[-1])]:
            return ["partly applied: apply again to repair", *lost]
        merged = [p for p, s in files if p in self.locked and digest(s[0]) != self.locked[p][0]]
        if merged or not self.locked:
            return [f"applied: merged from the patches for {self.old.version}"]
        if self.apply(False, only_check=True) == ["already applied"]:
            return [f"applied: {_count(files)}"]
        return ["applied: an earlier state of the patch set; apply again to update"]

    def _look(self, paths, strict: bool = True) -> None:
        """Record the state of every path; refuse all paths behind symlinks in one error."""
        self._now, refused = {}, []
        for path in sorted(paths):
            try:
                self._now[path] = self.checkout.look(path)
            except OverlayError as error:
                if error.code != DIFFERS_FROM_LOCK:
                    raise
                self._now[path] = None
                refused += [line for line in error.lines if line not in refused]
        _refuse(DIFFERS_FROM_LOCK, refused if strict else [])
        self._before = self._now | {path: states[0] for path, states in self.known.items()}
        self._check_git_only()

    def _check_git_only(self) -> None:
        """Leave out the patches of git-only files if one of these files is not as locked."""
        for path in self.patchset.lock.git_only().keys() & self.locked.keys():
            found = digest(self._before.get(path))
            if found not in self.locked[path]:
                why = "has been changed" if self._before.get(path) else "is not in this tree"
                self._leave_out(f"{path} {why}")
                return

    def _leave_out(self, why: str) -> None:
        """Go on as if the lock had no git-only files."""
        lock = self.patchset.lock
        if not lock.git_only():
            return
        self._left_out = lock.git_only_patches()
        self.locked = {p: sides for p, sides in self.locked.items() if p not in lock.git_only()}
        self.notices = [f"left out: {', '.join(sorted(self._left_out))}: {why}"]

    def _plan(self, link: bool, merged: Merged | None = None) -> tuple[States, Manifest]:
        """Return the final state of every path, and the final manifest.

        If an earlier state of the patch set is applied, the new one starts from the originals.

        Raises:
            OverlayError: a file differs from the lock, or local edits would be lost.
        """
        patchset, lock = self.patchset, self.patchset.lock
        patchset.check_against_lock()
        self._look(
            {*self.locked, *(merged.files if merged else ()), *patchset.overlay, *self.known}
        )
        patched = {p: after for p, (_, after) in self.locked.items() if lock.is_patched(p)}
        if merged:
            patched = {path: sha256(data) for path, data in merged.files.items()}
        differ = [p for p, (want, _) in self.locked.items() if digest(self._before[p]) != want]
        _refuse(DIFFERS_FROM_LOCK, [self._why_it_differs(path) for path in differ])

        link = link or any((states[-1] or "").startswith("link ") for states in self.known.values())
        before = self._before
        wanted: States = {path: regular(before[path], sha) for path, sha in patched.items()}
        for path, source in patchset.overlay.items():
            ours = regular(before[path], source.sha256, source.executable)
            wanted[path] = f"link {source.path}" if link else ours
        self._refuse_edits(self.known, wanted)
        foreign = [path for path in patchset.overlay if path not in {*self.known, *self.locked}]
        foreign = [path for path in foreign if not same(self._now[path], None, wanted[path])]
        foreign = [path for path in foreign if not self._is_committed(path, bool(merged))]
        message = "{} exists and is not ours: an overlay file would replace it"
        _refuse(LOCAL_EDITS, [message.format(path) for path in foreign])
        version = merged.version if merged else self.checkout.version
        new = Manifest(version, {path: [before[path], state] for path, state in wanted.items()})
        return before | wanted, new

    def _refuse_edits(self, paths, wanted: States | None = None) -> None:
        message = "{} was edited since the overlay was applied"
        ours = {path: [None, *self.known[path], (wanted or {}).get(path)] for path in paths}
        edited = [path for path, states in ours.items() if not same(self._now[path], *states)]
        _refuse(LOCAL_EDITS, [message.format(path) for path in edited])

    def _why_it_differs(self, path: str) -> str:
        if self._now[path] is None:
            return f"{path} is missing"
        if digest(self._now[path]) == self.locked[path][1]:
            return f"{path} is patched already, but its original is lost: restore it or fetch anew"
        return f"{path} differs from the lock"

    def _original(self, path: str) -> bytes | None:
        """Return the file as it was before the overlay, None if there was no regular one."""
        if digest(self._before.get(path)) is None:
            return None
        if path in self.known:
            return self.store.original(path, self.old)
        return self.checkout.path(path).read_bytes()

    def _is_committed(self, path: str, in_head: bool) -> bool:
        """Return whether a file's original is committed, in the version or with ``in_head`` HEAD.

        Then an overlay file may replace it, and --revert restores it.
        """
        if (data := self._original(path)) is None:
            return False
        version = self.patchset.lock.versions.get(self.checkout.version)
        revision = "HEAD" if in_head else version.commit or version.tag
        return git.is_committed(self.checkout.root, revision, path, data)

    def _move(self, new: Manifest | None, ends: States, tree: dict[str, bytes]) -> str:
        """Bring all paths to the states ``ends``; ``tree`` has the patched files."""
        changes = [path for path, state in ends.items() if not same(self._now[path], state)]
        contents = {}
        for path in [path for path in changes if digest(ends[path])]:
            if new is None or path not in new.files:
                contents[path] = self._original(path)
            elif path in self.patchset.overlay:
                contents[path] = self.patchset.overlay[path].path.read_bytes()
            else:
                contents[path] = tree[path]
            if sha256(contents[path]) != digest(ends[path]):
                raise OverlayError(FAILED, f"{path}: the patches give another file than the lock")
        self.store.move(new, ends, contents)
        return f"{'updated' if self.old else 'applied'}: {_count(changes)} changed"

    def _merge(self) -> Merged:
        """Merge every patched file.

        Base is the file of the version that the patches are for, ours is the last commit's file,
        theirs is the base with all patches.
        """
        lock, overlay = self.patchset.lock, self.patchset.overlay
        version = self.checkout.version if self.checkout.version in lock.locked else lock.pin
        original = upstream(lock, version, self.patchset.root).get
        scratch = self.store.scratch()
        theirs = series.last_tree(series.build(self._series(), original, scratch))
        self._look({*theirs, *overlay, *self.known})
        present = sorted(path for path in {*theirs, *overlay} if self._before[path])
        message = "{} is not as this git tree's last commit has it: commit first"
        edited = [path for path in present if not self._is_committed(path, True)]
        _refuse(LOCAL_EDITS, [message.format(path) for path in edited])

        files, notes = {}, []
        for path in sorted({*theirs, *overlay}):
            data = self._original(path)
            if path in overlay:
                # The sdist lacks the examples that a git tree has.
                if data != original(path) and path.startswith("megatron/"):
                    notes.append(f"review: {path} is ours, and not what upstream has in {version}")
                continue
            by = ", ".join(name[:4] for name in lock.files[path].by)
            if data is None:
                notes.append(f"gone: {path}, which {by} changed")
                continue
            labels = ["-L", "this tree", "-L", version, "-L", f"patches {by}"]
            change = original(path), theirs[path]
            files[path], clean = git.merge(data, *change, *labels, scratch=scratch)
            notes += [] if clean else [f"conflict: {path} with {by}"]
        return Merged(files, version, notes)


def _refuse(code: int, lines: list[str]) -> None:
    """Raise OverlayError with the lines, if there are any."""
    if lines:
        raise OverlayError(code, *lines)


def _count(paths) -> str:
    return f"{len(paths)} file{'s' * (len(paths) != 1)}"
