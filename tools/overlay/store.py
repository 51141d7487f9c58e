# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The private folder of a checkout, and how the checkout moves from one state to another.

``.mimo-overlay/`` holds
    originals/SHA256   the contents that we replaced
    applied.json       the manifest: per path what stood there, and what of ours may stand there

Before any file changes, the originals are kept and the manifest names, for every path, each state
that the run may leave there: the old one and the new one. A killed run thus leaves only files that
the manifest knows as ours or as upstream's, and the next run goes from them to wherever it is sent.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from overlay.checkout import STATE_DIR, Checkout, FileState, same, sha256
from overlay.errors import FAILED, OverlayError

Changes = dict[str, tuple[FileState | None, FileState | None]]  # by path: now, then


@dataclass
class Touched:
    """A path under our care: what stood there before us (None: nothing), and what we put there;
    several states, the newest last, only while a run is under way or after it was killed."""

    before: FileState | None
    ours: list[FileState]


@dataclass
class Manifest:
    """What is applied: touched files by path, the folders that were made for them, and the version
    that the patches were written for (another one than the checkout's after a three-way merge)."""

    version: str
    files: dict[str, Touched] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)

    @classmethod
    def from_json(cls, value: dict) -> "Manifest":
        files = {}
        for path, entry in value["files"].items():
            before = entry["before"] and FileState(**entry["before"])
            files[path] = Touched(before, [FileState(**state) for state in entry["ours"]])
        return cls(value["version"], files, value["folders"])

    def to_json(self) -> dict:
        files = {}
        for path, entry in sorted(self.files.items()):
            before = entry.before and entry.before.to_json()
            files[path] = {"before": before, "ours": [state.to_json() for state in entry.ours]}
        return {"version": self.version, "files": files, "folders": sorted(self.folders)}

    def on_the_way_to(self, new: "Manifest | None") -> "Manifest":
        """What must be known while files change from this manifest's states to those of ``new``."""
        if new is None:
            return self
        files = dict(self.files)
        for path, entry in new.files.items():
            old = files[path].ours if path in files else []
            files[path] = Touched(entry.before, [s for s in old if s not in entry.ours])
            files[path].ours.extend(entry.ours)
        return Manifest(new.version, files, sorted({*self.folders, *new.folders}))


class Store:
    """The private folder of one checkout."""

    def __init__(self, checkout: Checkout):
        self.checkout = checkout
        self.root = checkout.root / STATE_DIR
        self._originals = self.root / "originals"
        self._applied = self.root / "applied.json"
        for path in (self.root, self._originals):
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise OverlayError(
                    FAILED, f"{path} is not a folder of this tool: refused to use it"
                )

    @contextmanager
    def locked(self):
        """Keep a second run out of this checkout while the body runs, and tidy up after it."""
        descriptor = os.open(self.checkout.root, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                where = self.checkout.root
                raise OverlayError(FAILED, f"another run is at work in {where}") from None
            try:
                yield
            finally:
                with contextlib.suppress(OSError, OverlayError):
                    self._tidy()
        finally:
            os.close(descriptor)

    def manifest(self) -> Manifest | None:
        try:
            return Manifest.from_json(json.loads(self._applied.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise OverlayError(
                FAILED, f"{self._applied} is damaged: restore it or fetch anew"
            ) from None

    def original(self, digest: str) -> bytes:
        try:
            data = (self._originals / Path(digest).name).read_bytes()
        except OSError:
            data = b""
        if sha256(data) != digest:
            raise OverlayError(
                FAILED, f"{self._originals}/{digest} is missing or damaged: fetch anew"
            )
        return data

    def scratch(self) -> Path:
        """The private folder itself, made if need be: the place for temporary files."""
        self._originals.mkdir(parents=True, exist_ok=True)
        if not (self.root / ".gitignore").exists():
            self._replace(self.root / ".gitignore", b"*\n")
        return self.root

    def move(
        self,
        old: Manifest | None,
        new: Manifest | None,
        changes: Changes,
        contents: dict[str, bytes],
    ) -> None:
        """Carry the changes out, then let the manifest be ``new`` (None: nothing is applied).

        ``contents`` has, by sha256, the regular files that are put in place.

        Raises:
            OverlayError: the machine refused a step; the changes were undone.
        """
        present = [path for path, (now, _) in changes.items() if now and now.sha256]
        contents = contents | {changes[p][0].sha256: self.checkout.read(p) for p in present}
        made, wanted = (set(manifest.folders) if manifest else set() for manifest in (old, new))
        self.scratch()
        for path, entry in new.files.items() if new else ():
            if entry.before and entry.before.sha256:
                if old and path in old.files:
                    self.original(entry.before.sha256)
                else:
                    self._keep(self.checkout.read(path))
        self._write_manifest((old or Manifest(new.version)).on_the_way_to(new))
        try:
            self._go(wanted, {p: then for p, (_, then) in changes.items()}, made - wanted, contents)
        except OSError as error:
            self._go(made, {p: now for p, (now, _) in changes.items()}, wanted - made, contents)
            self._write_manifest(old)
            path = error.filename2 or error.filename
            raise OverlayError(
                FAILED, f"{path}: {error.strerror}: the checkout is as before"
            ) from None
        self._write_manifest(new)

    def record(self, manifest: Manifest, originals: list[bytes]) -> None:
        """Take the files of the checkout, as they stand, under our care."""
        self.scratch()
        for data in originals:
            self._keep(data)
        self._write_manifest(manifest)

    def _go(
        self,
        folders: Iterable[str],
        states: dict[str, FileState | None],
        unneeded: Iterable[str],
        contents: dict[str, bytes],
    ) -> None:
        for folder in sorted(folders):
            self.checkout.path(folder).mkdir(exist_ok=True)
        for path, state in sorted(states.items()):
            if not same(self.checkout.look(path), state):
                self._put(self.checkout.path(path), state, contents)
        for folder in sorted(unneeded, reverse=True):
            _remove_if_empty(self.checkout.path(folder))

    def _put(self, path: Path, state: FileState | None, contents: dict[str, bytes]) -> None:
        if state is None:
            path.unlink(missing_ok=True)
            return
        temporary = self.root / "tmp"
        temporary.unlink(missing_ok=True)
        if state.link is not None:
            temporary.symlink_to(state.link)
        else:
            temporary.write_bytes(contents[state.sha256])
            temporary.chmod(state.mode)
        os.replace(temporary, path)

    def _keep(self, data: bytes) -> None:
        self._replace(self._originals / sha256(data), data)

    def _write_manifest(self, manifest: Manifest | None) -> None:
        if manifest is None:
            self._applied.unlink(missing_ok=True)
        else:
            self._replace(self._applied, json.dumps(manifest.to_json(), indent=1).encode())

    def _replace(self, path: Path, data: bytes) -> None:
        """Write a file of ours so that it is old or new, never torn."""
        temporary = self.root / "tmp"
        temporary.unlink(missing_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)

    def _tidy(self) -> None:
        """Remove what no manifest needs; without a manifest, the private folder itself."""
        manifest = self.manifest()
        if manifest is None:
            shutil.rmtree(self.root, ignore_errors=True)
            return
        used = {entry.before.sha256 for entry in manifest.files.values() if entry.before}
        for path in [*self.root.iterdir(), *self._originals.iterdir()]:
            if path.name not in {".gitignore", "applied.json", "originals", *used}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder that we made, unless somebody put files of their own into it. Bytecode caches
    of files that are gone do not count."""
    cache = folder / "__pycache__"
    try:
        if [entry.name for entry in folder.iterdir()] == [cache.name]:
            shutil.rmtree(cache)
        folder.rmdir()
    except FileNotFoundError:
        pass
    except OSError:
        if not any(folder.iterdir()):
            raise
