# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The private folder of a checkout, and how the checkout moves from one state to another.

``.mimo-overlay/`` holds:
    originals/SHA256   contents of the files that we replaced
    applied.json       the manifest: each path's original state, and the states we give it

Before any file changes, the originals are stored, and the manifest lists for every path each state
that the run may leave there: the old one and the new one. So a killed run leaves only files that
the manifest knows as ours or as upstream's, and the next run can start from them.
"""

import contextlib
import fcntl
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from overlay.checkout import STATE_DIR, Checkout, digest, parents, same, sha256
from overlay.errors import FAILED, OverlayError

States = dict[str, str | None]  # by path


@dataclass
class Manifest:
    """The record of what is applied.

    version: the one that the patches are written for, which is not the checkout's after a three-way
    merge. files: by path, the original state, followed by the states that we gave it; several only
    while a run is under way or after it was killed.
    """

    version: str
    files: dict[str, list[str | None]]


class Store:
    """The private folder of one checkout."""

    def __init__(self, checkout: Checkout):
        self.checkout = checkout
        self.root = checkout.root / STATE_DIR
        self._originals = self.root / "originals"
        self._applied = self.root / "applied.json"
        for path in (self.root, self._originals):
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise OverlayError(FAILED, f"{path} is not a folder of this tool: refused")

    @contextmanager
    def locked(self):
        """Lock this checkout against other runs inside the block, and tidy up after it."""
        descriptor = os.open(self.checkout.root, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
            self._tidy()
        except BlockingIOError:
            message = f"another run is at work in {self.checkout.root}"
            raise OverlayError(FAILED, message) from None
        except (OverlayError, OSError):
            with contextlib.suppress(OverlayError, OSError):
                self._tidy()
            raise
        finally:
            os.close(descriptor)

    def manifest(self) -> Manifest | None:
        try:
            return Manifest(**json.loads(self._applied.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError):
            message = f"{self._applied} is damaged: restore it or fetch anew"
            raise OverlayError(FAILED, message) from None

    def original(self, path: str, manifest: Manifest) -> bytes | None:
        """Return the content of ``path`` before the overlay, None if it was no regular file."""
        if path not in manifest.files:
            return self.checkout.read(path)
        if (wanted := digest(manifest.files[path][0])) is None:
            return None
        kept = self._originals / Path(wanted).name
        data = kept.read_bytes() if kept.is_file() else b""
        if sha256(data) != wanted:
            raise OverlayError(FAILED, f"{kept} is missing or damaged: fetch anew")
        return data

    def scratch(self) -> Path:
        """Return the private folder for temporary files, and make it if it is missing."""
        self._originals.mkdir(parents=True, exist_ok=True)
        if not (self.root / ".gitignore").exists():
            self._replace(self.root / ".gitignore", b"*\n")
        return self.root

    def ends(self, new: Manifest | None) -> States:
        """Return the state that each path gets when ``new`` replaces the present manifest."""
        old = self.manifest()
        originals = {path: states[0] for path, states in old.files.items()} if old else {}
        return originals | {path: states[-1] for path, states in (new.files if new else {}).items()}

    def move(self, new: Manifest | None, contents: dict[str, bytes]) -> None:
        """Bring every path to its final state, then write the manifest ``new`` (None: nothing
        applied).

        Raises:
            OverlayError: the operating system refused a step; all changes are undone.
        """
        old, ends = self.manifest() or Manifest("", {}), self.ends(new)
        now = {path: self.checkout.look(path) for path in ends}
        undo = {path: self.checkout.read(path) for path in ends if digest(now[path])}
        files = dict(old.files)
        for path, (before, *ours) in new.files.items() if new else ():
            if path not in old.files and digest(before):
                self.keep(undo[path])
            files[path] = [*files.get(path, [before]), *ours]
        self.write(Manifest(new.version if new else old.version, files))
        try:
            self._go(ends, contents)
        except OSError as error:
            self._go(now, undo)
            self.write(old if old.files else None)
            path = error.filename2 or error.filename
            message = f"{path}: {error.strerror}: the checkout is as before"
            raise OverlayError(FAILED, message) from None
        self.write(new)

    def keep(self, original: bytes) -> None:
        self._replace(self.scratch() / "originals" / sha256(original), original)

    def write(self, manifest: Manifest | None) -> None:
        if manifest is None:
            self._applied.unlink(missing_ok=True)
        else:
            data = json.dumps(asdict(manifest), indent=1, sort_keys=True).encode()
            self._replace(self.scratch() / "applied.json", data)

    def _go(self, ends: States, contents: dict[str, bytes]) -> None:
        changes = {p: end for p, end in ends.items() if not same(self.checkout.look(p), end)}
        for relative, end in sorted(changes.items()):
            path = self.checkout.path(relative)
            if end is None:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                mode, _, target = end.partition(" ")
                self._replace(path, target if mode == "link" else contents[relative], mode)
        for path in [path for path, state in ends.items() if state is None]:
            self._remove_empty_folders(path)

    def _replace(self, path: Path, content: bytes | str, mode: str = "644") -> None:
        """Write a file, or a symlink if ``content`` is a text, atomically."""
        temporary = self.root / "tmp"
        temporary.unlink(missing_ok=True)
        if isinstance(content, str):
            temporary.symlink_to(content)
        else:
            temporary.write_bytes(content)
            temporary.chmod(int(mode, 8))
        os.replace(temporary, path)

    def _remove_empty_folders(self, path: str) -> None:
        """Remove empty folders above a removed file of ours; bytecode caches count as empty."""
        for folder in map(self.checkout.path, reversed(parents(path))):
            if folder.is_dir():
                if any(entry.name != "__pycache__" for entry in folder.iterdir()):
                    return
                shutil.rmtree(folder / "__pycache__", ignore_errors=True)
                folder.rmdir()

    def _tidy(self) -> None:
        """Remove what the manifest does not need; without a manifest, the private folder itself."""
        used: set[str | None] = set()
        if manifest := self.manifest():
            used = {digest(states[0]) for states in manifest.files.values()}
            used |= {".gitignore", "applied.json", "originals"}
        for folder in (self._originals, self.root):
            for path in folder.iterdir() if folder.exists() else ():
                if path.name not in used:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not manifest and self.root.exists():
            self.root.rmdir()
