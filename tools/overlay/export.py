# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Write our side of the patch set: canonical patches, the series, the lock; or check them."""

import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from overlay import git, header
from overlay.checkout import Checkout, check_relative, sha256
from overlay.errors import FAILED, OverlayError
from overlay.fetch import sdist_file
from overlay.patchset import BY_OVERLAY, PATCH_NAME, LockedFile, PatchSet
from overlay.store import Store


class Pristine:
    """Upstream's files as pinned: from a pristine tree, or from the sdist (fetched when needed)."""

    def __init__(self, patchset: PatchSet, tree: Path | None):
        self._files: dict[str, bytes] = {}
        if tree:
            root = Checkout(tree, patchset.lock.version).root
            for path in root.glob("megatron/**/*"):
                if path.is_file():
                    self._files[path.relative_to(root).as_posix()] = path.read_bytes()
            return
        with tarfile.open(sdist_file(patchset.lock, patchset.root)) as archive:
            for member in archive:
                if member.isfile():
                    path = member.name.partition("/")[2]
                    self._files[path] = archive.extractfile(member).read()

    def get(self, path: str) -> bytes | None:
        return self._files.get(path)

    def sources(self) -> Iterator[tuple[str, bytes]]:
        """The Python files, which both sources of the pin have alike."""
        for path, data in self._files.items():
            if path.startswith("megatron/") and path.endswith(".py"):
                yield path, data


@dataclass
class Step:
    """One patch of the series: the files it touches, and all patched files as it leaves them."""

    name: str
    header: bytes
    paths: set[str]
    tree: dict[str, bytes]


def build_steps(patches: dict[str, bytes], pristine: Pristine) -> list[Step]:
    """Apply the patches in order to upstream's files.

    Raises:
        OverlayError: a patch does not apply, or touches what upstream does not have.
    """
    steps, tree = [], {}
    for name, patch in patches.items():
        head, diff = header.split(patch)
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            paths = git.touched(f"patches/{name}", diff, work) if diff else {}
            for path in paths:
                check_relative(path, f"patches/{name}")
                data = tree.get(path, pristine.get(path))
                if data is None:
                    raise OverlayError(FAILED, f"patches/{name}: upstream has no {path}")
                _write(work / path, data)
            if diff:
                git.apply(f"patches/{name}", diff, work)
            tree = tree | {path: (work / path).read_bytes() for path in paths}
        steps.append(Step(name, head, set(paths), tree))
    return steps


def render(steps: list[Step], pristine: Pristine) -> dict[str, bytes]:
    """The canonical text of each patch: what it changes against what stands before it."""
    texts, before = {}, {}
    for step in steps:
        with tempfile.TemporaryDirectory() as folder:
            for side, tree in (("a", before), ("b", step.tree)):
                Path(folder, side).mkdir()
                for path in step.paths:
                    _write(Path(folder, side, path), tree.get(path, pristine.get(path)))
            diff = git.diff("a", "b", Path(folder))
        if not diff:
            raise OverlayError(FAILED, f"patches/{step.name} changes nothing: fill or delete it")
        texts[step.name] = header.join(step.header, diff)
        before = step.tree
    return texts


def relock(patchset: PatchSet, pristine: Pristine, only_check: bool) -> list[str]:
    """Bring patches, series and lock to their canonical form.

    Raises:
        OverlayError: the patch set is inconsistent; or, with ``only_check``, not in that form.
    """
    return _store(patchset, pristine, _patches(patchset), only_check)


def export(
    patchset: PatchSet, checkout: Checkout, pristine: Pristine, into: str | None
) -> list[str]:
    """Carry edits made in an applied checkout to upstream's files over into the patches.

    An edit belongs to the patch numbered ``into``, or else to the only patch that touches its file.
    """
    patches = _patches(patchset)
    steps = build_steps(patches, pristine)
    edits = _edits(patchset, checkout, pristine, steps[-1].tree if steps else {})
    for path, (applied, edited) in edits.items():
        owner = _owner(steps, path, into)
        steps[owner].paths.add(path)
        for step in steps[owner:]:
            ours = step.tree.get(path, pristine.get(path))
            step.tree = step.tree | {path: _carry(step.name, path, ours, applied, edited)}
    lines = _store(patchset, pristine, render(steps, pristine), only_check=False)
    Store(checkout).adopt({path: pristine.get(path) for path in edits})
    return [f"{len(edits)} edited", *edits, *lines]


def check_patches(patchset: PatchSet) -> list[str]:
    """Check the header and size of every patch file.

    Raises:
        OverlayError: one line for each thing that is wrong.
    """
    patches, lines = _patches(patchset), []
    for name, patch in patches.items():
        diff = header.split(patch)[1]
        counts = git.touched(f"patches/{name}", diff, patchset.root) if diff else {}
        lines += header.problems(name, patch, sum(counts.values()))
    if lines:
        raise OverlayError(FAILED, *lines)
    return [f"{len(patches)} patch headers are in order"]


def _patches(patchset: PatchSet) -> dict[str, bytes]:
    """Every patch file by name, in the order of their numbers."""
    names = sorted(path.name for path in patchset.patch_dir.glob("*.patch"))
    for name, following in zip(names, [*names[1:], ""], strict=True):
        if not PATCH_NAME.fullmatch(name):
            raise OverlayError(FAILED, f"patches/{name} is not named NNNN-topic.patch")
        if name[:4] == following[:4]:
            raise OverlayError(FAILED, f"patches/{name} and {following} have the same number")
    return {name: patchset.patch(name) for name in names}


def _store(
    patchset: PatchSet, pristine: Pristine, patches: dict[str, bytes], only_check: bool
) -> list[str]:
    steps = build_steps(patches, pristine)
    texts = render(steps, pristine)
    lock = patchset.lock
    lock.patches = {name: sha256(text) for name, text in texts.items()}
    lock.files = _locked_files(patchset, pristine, steps)
    files = {name: text for name, text in texts.items()}
    files["series"] = "".join(f"{name}\n" for name in texts).encode()
    files["upstream.toml"] = lock.text().encode()
    stale = [name for name, text in files.items() if _read(patchset.patch_dir / name) != text]
    if only_check and stale:
        raise OverlayError(FAILED, *(f"patches/{name} is stale: run `make lock`" for name in stale))
    for name in stale:
        (patchset.patch_dir / name).write_bytes(files[name])
    return [f"wrote patches/{name}" for name in stale] or ["patches and lock are up to date"]


def _locked_files(
    patchset: PatchSet, pristine: Pristine, steps: list[Step]
) -> dict[str, LockedFile]:
    locked = {}
    for path, after in (steps[-1].tree if steps else {}).items():
        by = tuple(step.name for step in steps if path in step.paths)
        if path in patchset.overlay:
            raise OverlayError(FAILED, f"{path} is both an overlay file and touched by {by[0]}")
        locked[path] = LockedFile(sha256(pristine.get(path)), sha256(after), by)
    for path, source in patchset.overlay.items():
        if (data := pristine.get(path)) is not None:
            locked[path] = LockedFile(sha256(data), source.sha256, (BY_OVERLAY,))
    return locked


def _edits(
    patchset: PatchSet, checkout: Checkout, pristine: Pristine, tree: dict[str, bytes]
) -> dict[str, tuple[bytes, bytes]]:
    """Upstream files that were edited in an applied checkout: path -> (as applied, as edited)."""
    manifest = Store(checkout).manifest()
    for path, data in tree.items():
        entry = manifest.files.get(path) if manifest else None
        if entry is None or entry.after.sha256 != sha256(data):
            raise OverlayError(
                FAILED, f"{checkout.root} has not the present patches applied (see {path})"
            )
    edits = {}
    for path, data in pristine.sources():
        applied = tree.get(path, data)
        if path in patchset.overlay or (state := checkout.look(path)) is None:
            continue
        if state.sha256 != sha256(applied):
            edits[path] = (applied, checkout.path(path).read_bytes())
    return edits


def _owner(steps: list[Step], path: str, into: str | None) -> int:
    """Index of the patch that an edit of ``path`` belongs to."""
    if into:
        found = [index for index, step in enumerate(steps) if step.name.startswith(f"{into}-")]
        if not found:
            raise OverlayError(FAILED, f"--into {into}: there is no patches/{into}-*.patch")
        return found[0]
    found = [index for index, step in enumerate(steps) if path in step.paths]
    if len(found) != 1:
        names = ", ".join(steps[index].name for index in found) or "no patch"
        raise OverlayError(FAILED, f"{path} is touched by {names}: name one with --into NNNN")
    return found[0]


def _carry(name: str, path: str, ours: bytes, applied: bytes, edited: bytes) -> bytes:
    """``path`` as patch ``name`` leaves it (``ours``), with the edit of the fully applied file."""
    with tempfile.TemporaryDirectory() as folder:
        versions = {"ours": ours, "applied": applied, "edited": edited}
        for file, data in versions.items():
            Path(folder, file).write_bytes(data)
        merged = git.merge(*(Path(folder, file) for file in versions))
    if merged is None:
        raise OverlayError(FAILED, f"{path}: the edit meets lines of patches after {name}")
    return merged


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
