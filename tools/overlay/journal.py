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
from pathlib import Path

from overlay.checkout import LINK, STATE_DIR, Checkout, Entry, check_relative, state
from overlay.errors import FAILED, OverlayError

Entries = dict[str, Entry | None]  # by path; None: no file


@contextlib.contextmanager
def alone(checkout: Checkout) -> Iterator[None]:
    """Keep other runs out of the checkout; refuse if one is at work."""
    descriptor = os.open(checkout.root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise OverlayError(FAILED, f"another run is at work in {checkout.root}") from None
    finally:
        os.close(descriptor)


class Journal:
    """The journal of one checkout. Without one, nothing is applied, and it has no paths.

    originals: what lay at each path of ours before. states: those that we gave it; several, and
    None, only while a run is under way or after it was killed.
    """

    def __init__(self, checkout: Checkout):
        self.checkout = checkout
        self._folder = checkout.root / STATE_DIR
        self._file = self._folder / "applied.json"
        self.originals: Entries = {}
        self.states: dict[str, list[str | None]] = {}
        if self._folder.is_symlink():
            raise OverlayError(FAILED, f"{self._folder} is not a folder of this tool: refused")
        try:
            for path, (mode, text, states) in json.loads(self._file.read_text()).items():
                original = None if mode is None else Entry(text.encode("latin-1"), mode)
                self.originals[check_relative(path, self._file.name)] = original
                self.states[path] = states
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError):
            what = f"{self._file} is damaged, or another version of this tool wrote it"
            cure = f"restore it, revert by that version, or remove {checkout.root} and fetch anew"
            raise OverlayError(FAILED, f"{what}: {cure}") from None

    def before(self, path: str) -> Entry | None:
        """Return what lay at a path before the overlay."""
        return self.originals[path] if path in self.originals else self.checkout.look(path)

    def read(self, path: str) -> bytes | None:
        """Return a file as it was before the overlay; None if there was no regular one."""
        entry = self.before(path)
        return entry.data if entry and entry.mode != LINK else None

    def changes(self, goal: dict[str, Entry]) -> list[str]:
        """Return the paths that change when those of ``goal``, and no others, become ours."""
        targets = sorted((self.originals | goal).items())
        return [path for path, to in targets if state(self.checkout.look(path)) != state(to)]

    def move(self, goal: dict[str, Entry]) -> None:
        """Make the paths of ``goal`` ours, and restore the originals of all others."""
        before, old = self.originals, self.states
        targets = before | goal
        originals = {path: self.before(path) for path in goal}
        new = {path: [state(entry)] for path, entry in goal.items()}
        both = {path: [None, *old.get(path, []), *new.get(path, [])] for path in targets}
        self.write(before | originals, both)
        for path, target in sorted(targets.items()):
            self._change(path, target)
        self.write(originals, new)

    def write(self, originals: Entries, states: dict[str, list]) -> None:
        """Write the journal; without paths, remove it."""
        self.originals, self.states = originals, states
        if not originals:
            self._file.unlink(missing_ok=True)
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        table = {}
        for path, one in sorted(originals.items()):
            table[path] = [one and one.mode, one and one.data.decode("latin-1"), states[path]]
        self._folder.mkdir(exist_ok=True)
        self._replace(self._folder / ".gitignore", Entry(b"*\n"))
        self._replace(self._file, Entry(json.dumps(table, indent=1).encode()))

    def _change(self, relative: str, target: Entry | None) -> None:
        """Give a path its target, unless it has it; remove folders that become empty.

        Bytecode caches count as empty.
        """
        path = self.checkout.root / relative
        if target is not None:
            if state(self.checkout.look(relative)) != state(target):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._replace(path, target)
            return
        path.unlink(missing_ok=True)
        for folder in (folder for folder in path.parents if folder.is_dir()):
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
