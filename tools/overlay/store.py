# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The private folder of a checkout, and the transaction that moves the checkout between states.

``.mimo-overlay/`` holds
    blobs/SHA256    contents: the originals we replaced and, during a transaction, old and new ones
    applied.json    the manifest: per touched path its state before and after, and folders we made
    journal.json    only while a transaction is under way: everything that is needed to end it

The journal appears by one rename, after all contents lie in ``blobs/``. Before it, a killed run has
changed nothing; after it, any later run ends what the journal says. Each step is idempotent.
"""

import fcntl
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from overlay.checkout import STATE_DIR, Checkout, FileState, same, sha256, state_from_json
from overlay.errors import FAILED, LOCAL_EDITS, OverlayError


@dataclass(frozen=True)
class TouchedFile:
    """A path under our care: what stood there before us (None: nothing) and what we put there."""

    before: FileState | None
    after: FileState


@dataclass
class Manifest:
    """What is applied: touched files by path, and the folders that were made for them."""

    files: dict[str, TouchedFile] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)

    @classmethod
    def from_json(cls, value: dict) -> "Manifest":
        files = {
            path: TouchedFile(state_from_json(entry["before"]), FileState(**entry["after"]))
            for path, entry in value["files"].items()
        }
        return cls(files, value["folders"])

    def to_json(self) -> dict:
        files = {
            path: {
                "before": entry.before and entry.before.to_json(),
                "after": entry.after.to_json(),
            }
            for path, entry in sorted(self.files.items())
        }
        return {"files": files, "folders": sorted(self.folders)}


@dataclass
class Transaction:
    """From one manifest to another (None: nothing applied), with every path that must change."""

    changes: dict[str, tuple[FileState | None, FileState | None]]
    old: Manifest | None
    new: Manifest | None

    def reversed(self) -> "Transaction":
        changes = {path: (new, old) for path, (old, new) in self.changes.items()}
        return Transaction(changes, self.new, self.old)

    @classmethod
    def from_json(cls, value: dict) -> "Transaction":
        changes = {
            path: (state_from_json(old), state_from_json(new))
            for path, (old, new) in value["changes"].items()
        }
        old, new = (value[name] and Manifest.from_json(value[name]) for name in ("old", "new"))
        return cls(changes, old, new)

    def to_json(self) -> dict:
        changes = {
            path: [state and state.to_json() for state in pair]
            for path, pair in sorted(self.changes.items())
        }
        return {
            "changes": changes,
            "old": self.old and self.old.to_json(),
            "new": self.new and self.new.to_json(),
        }


class Store:
    """The private folder of one checkout."""

    def __init__(self, checkout: Checkout):
        self.checkout = checkout
        self.root = checkout.root / STATE_DIR
        self._blobs = self.root / "blobs"
        self._applied = self.root / "applied.json"
        self._journal = self.root / "journal.json"
        for path in (self.root, self._blobs):
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise OverlayError(
                    FAILED, f"{path} is not a folder of this tool: refused to use it"
                )

    @contextmanager
    def locked(self):
        """Keep a second run out of this checkout while the body runs."""
        descriptor = os.open(self.checkout.root, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                where = self.checkout.root
                raise OverlayError(FAILED, f"another run is at work in {where}") from None
            yield
        finally:
            os.close(descriptor)

    def manifest(self) -> Manifest | None:
        return self._read(self._applied, Manifest)

    def pending(self) -> Transaction | None:
        """The transaction that an earlier run was killed in, if any."""
        return self._read(self._journal, Transaction)

    def _read(self, path: Path, kind):
        try:
            return kind.from_json(json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise OverlayError(FAILED, f"{path} is damaged: restore it or fetch anew") from None

    def _replace(self, path: Path, data: bytes) -> None:
        """Write a file of ours so that it is old or new, never torn."""
        temporary = self._temporary()
        temporary.write_bytes(data)
        os.replace(temporary, path)

    def _temporary(self) -> Path:
        """Where a file is made before it is renamed into place; nothing stands there."""
        path = self.root / "tmp"
        path.unlink(missing_ok=True)
        return path

    def keep(self, data: bytes) -> str:
        """Store contents; returns their sha256."""
        digest = sha256(data)
        blob = self._blobs / digest
        if not blob.is_file() or blob.read_bytes() != data:
            self._blobs.mkdir(parents=True, exist_ok=True)
            if not (self.root / ".gitignore").exists():
                self._replace(self.root / ".gitignore", b"*\n")
            self._replace(blob, data)
        return digest

    def contents(self, digest: str) -> bytes:
        try:
            data = (self._blobs / Path(digest).name).read_bytes()
        except OSError:
            data = b""
        if sha256(data) != digest:
            raise OverlayError(FAILED, f"{self._blobs}/{digest} is missing or damaged: fetch anew")
        return data

    def run(self, transaction: Transaction) -> None:
        """Carry a transaction out. Every content in it must have been kept before.

        Raises:
            OverlayError: the machine refused a step; the changes were undone.
        """
        states = [state for pair in transaction.changes.values() for state in pair]
        for state in states:
            if state and state.link is None:
                self.contents(state.sha256)
        self._write_journal(transaction)
        try:
            self._replay(transaction)
        except OSError as error:
            undo = transaction.reversed()
            self._write_journal(undo)
            self._replay(undo)
            path = error.filename2 or error.filename
            raise OverlayError(
                FAILED, f"{path}: {error.strerror}: the checkout is as before"
            ) from None

    def finish_pending(self) -> bool:
        """End what a killed run began; False where there was nothing to end.

        Raises:
            OverlayError: a path was edited since, and ending it would lose the edit.
        """
        transaction = self.pending()
        if transaction is None:
            return False
        edited = [
            path
            for path, pair in transaction.changes.items()
            if (now := self.checkout.look(path)) and not any(same(now, state) for state in pair)
        ]
        if edited:
            raise OverlayError(
                LOCAL_EDITS,
                *(f"{path} was edited since an interrupted run: move it away" for path in edited),
            )
        self.run(transaction)
        return True

    def adopt(self, originals: dict[str, bytes]) -> None:
        """Take edited files, whose originals are given, under our care as they stand."""
        with self.locked():
            manifest = self.manifest() or Manifest()
            for path, original in originals.items():
                now = self.checkout.look(path)
                before = FileState(sha256=self.keep(original), mode=now.mode)
                manifest.files.setdefault(path, TouchedFile(before, now))
            if originals:
                self._write_manifest(manifest)

    def tidy(self) -> None:
        """Remove contents that no manifest needs; without a manifest, the private folder itself."""
        if not self.root.exists() or self.pending():
            return
        manifest = self.manifest()
        if manifest is None:
            shutil.rmtree(self.root)
            return
        used = {entry.before.sha256 for entry in manifest.files.values() if entry.before}
        for blob in self._blobs.iterdir():
            if blob.name not in used:
                blob.unlink()
        for scratch in self.root.glob("scratch-*"):
            shutil.rmtree(scratch)

    def _write_journal(self, transaction: Transaction) -> None:
        self.root.mkdir(exist_ok=True)
        self._replace(self._journal, json.dumps(transaction.to_json(), indent=1).encode())

    def _write_manifest(self, manifest: Manifest) -> None:
        self._replace(self._applied, json.dumps(manifest.to_json(), indent=1).encode())

    def _replay(self, transaction: Transaction) -> None:
        new = set(transaction.new.folders if transaction.new else ())
        old = set(transaction.old.folders if transaction.old else ())
        for folder in sorted(new):
            self.checkout.path(folder).mkdir(exist_ok=True)
        for path, (_, state) in sorted(transaction.changes.items()):
            if not same(self.checkout.look(path), state):
                self._put(self.checkout.path(path), state)
        for folder in sorted(old - new, reverse=True):
            _remove_if_empty(self.checkout.path(folder))
        if transaction.new:
            self._write_manifest(transaction.new)
        else:
            self._applied.unlink(missing_ok=True)
        self._journal.unlink()
        self.tidy()

    def _put(self, path: Path, state: FileState | None) -> None:
        if state is None:
            path.unlink(missing_ok=True)
            return
        temporary = self._temporary()
        if state.link is not None:
            temporary.symlink_to(state.link)
        else:
            temporary.write_bytes(self.contents(state.sha256))
            temporary.chmod(state.mode)
        os.replace(temporary, path)


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
