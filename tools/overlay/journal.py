# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The journal of a checkout, ``.mimo-overlay/applied.json``, and how the checkout's files change.

The journal has, for every path of ours, what lay there before, and each state that we may have left
there. A run writes it before any file changes, with the old states and the new ones. So a killed
run leaves only files that the journal knows as ours or as upstream's, and the next run can start
from them.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from overlay.checkout import LINK, STATE_DIR, Checkout, Entry, check_relative, state
from overlay.errors import FAILED, OverlayError


@dataclass
class Known:
    """One path of ours.

    original: what lay there before. states: those that we gave it; several only while a run is
    under way or after it was killed.
    """

    original: Entry | None
    states: list[str | None]


@contextlib.contextmanager
def alone(checkout: Checkout) -> Iterator[None]:
    """Wait until no other run is at work in the checkout, and keep others out."""
    descriptor = os.open(checkout.root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Journal:
    """The journal of one checkout. Without one, nothing is applied, and ``paths`` is empty."""

    def __init__(self, checkout: Checkout):
        self.checkout = checkout
        self._folder = checkout.root / STATE_DIR
        self._file = self._folder / "applied.json"
        if self._folder.is_symlink() or (self._folder.exists() and not self._folder.is_dir()):
            raise OverlayError(FAILED, f"{self._folder} is not a folder of this tool: refused")
        self.paths: dict[str, Known] = {}
        try:
            for path, (mode, text, states) in json.loads(self._file.read_text()).items():
                original = None if mode is None else Entry(text.encode("latin-1"), mode)
                self.paths[check_relative(path, self._file.name)] = Known(original, states)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError):
            what = f"{self._file} is damaged, or another version of this tool wrote it"
            cure = f"restore it, revert by that version, or remove {checkout.root} and fetch anew"
            raise OverlayError(FAILED, f"{what}: {cure}") from None

    def tidy(self) -> None:
        """Remove what a killed run may have left."""
        (self._folder / "tmp").unlink(missing_ok=True)

    def before(self, path: str) -> Entry | None:
        """Return what lay at a path before the overlay."""
        return self.paths[path].original if path in self.paths else self.checkout.look(path)

    def read(self, path: str) -> bytes | None:
        """Return a file as it was before the overlay; None if there was no regular one."""
        entry = self.before(path)
        return entry.data if entry and entry.mode != LINK else None

    def targets(self, goal: dict[str, Entry]) -> dict[str, Entry | None]:
        """Return what each path gets when the paths of ``goal``, and no others, become ours."""
        return {path: known.original for path, known in self.paths.items()} | goal

    def changes(self, goal: dict[str, Entry]) -> list[str]:
        """Return the paths that must change to get there."""
        targets = sorted(self.targets(goal).items())
        return [path for path, to in targets if state(self.checkout.look(path)) != state(to)]

    def has(self, goal: dict[str, Entry]) -> bool:
        """Return whether ``goal`` is applied: in the journal, and in the checkout."""
        known = {path: known.states for path, known in self.paths.items()}
        return known == {path: [state(to)] for path, to in goal.items()} and not self.changes(goal)

    def move(self, goal: dict[str, Entry]) -> None:
        """Make the paths of ``goal`` ours, and restore the originals of all others.

        Raises:
            OverlayError: the operating system refused a step; all changes are undone.
        """
        old, targets = self.paths, self.targets(goal)
        now = {path: self.checkout.look(path) for path in targets}
        known = {path: old.get(path) or Known(self.before(path), []) for path in goal}
        ours = {path: state(to) for path, to in goal.items()}
        both = {path: Known(k.original, [*k.states, ours[path]]) for path, k in known.items()}
        self.write(old | both)
        try:
            self._change(targets)
        except OSError as error:
            self._change(now)
            self.write(old)
            path = error.filename2 or error.filename
            what = f"{path}: {error.strerror}: the checkout is as before"
            raise OverlayError(FAILED, what) from None
        self.write({path: Known(k.original, [ours[path]]) for path, k in known.items()})

    def write(self, paths: dict[str, Known]) -> None:
        self.paths = paths
        if not paths:
            self._file.unlink(missing_ok=True)
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        table = {}
        for path, known in sorted(paths.items()):
            one = known.original
            table[path] = [one and one.mode, one and one.data.decode("latin-1"), known.states]
        self._folder.mkdir(exist_ok=True)
        self._replace(self._folder / ".gitignore", Entry(b"*\n"))
        self._replace(self._file, Entry(json.dumps(table, indent=1).encode()))

    def _change(self, targets: dict[str, Entry | None]) -> None:
        """Give each path its target, and touch none that has it."""
        for relative, target in sorted(targets.items()):
            path = self.checkout.root / relative
            if target is None:
                path.unlink(missing_ok=True)
                self._remove_empty_folders(path)
            elif state(self.checkout.look(relative)) != state(target):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._replace(path, target)

    def _remove_empty_folders(self, path: Path) -> None:
        """Remove empty folders above a removed file of ours; bytecode caches count as empty."""
        for folder in path.parents:
            if folder.is_dir():
                if any(entry.name != "__pycache__" for entry in folder.iterdir()):
                    return
                shutil.rmtree(folder / "__pycache__", ignore_errors=True)
                folder.rmdir()

    def _replace(self, path: Path, entry: Entry) -> None:
        """Write a file or a symlink atomically."""
        temporary = self._folder / "tmp"
        temporary.unlink(missing_ok=True)
        if entry.mode == LINK:
            temporary.symlink_to(os.fsdecode(entry.data))
        else:
            temporary.write_bytes(entry.data)
            temporary.chmod(int(entry.mode, 8))
        os.replace(temporary, path)
