# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fetch a locked upstream: the package's sdist, or a clone of the tag, verified before use.

The tree is prepared beside its destination and then renamed: the destination is complete or absent.
"""

import functools
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from overlay.checkout import Checkout, sha256
from overlay.errors import DIFFERS_FROM_LOCK, FAILED, NOT_THE_PIN, USAGE, OverlayError, refuse
from overlay.git import reason, user_git
from overlay.patchset import Lock, Version, check_version

# Requirements of upstream's build, which pip runs to read an sdist's metadata. Given these, pip
# need not make an isolated environment with all of torch in it.
_BUILD_REQUIREMENTS = ["setuptools>=80", "pybind11", "packaging>=24.2"]


def upstream(lock: Lock, version: str, root: Path) -> dict[str, bytes]:
    """Return the files of a locked version from its sdist, by path."""
    return packed_files(sdist_file(lock.versions[version], root))


@functools.cache
def packed_files(sdist: Path) -> dict[str, bytes]:
    """Return an sdist's files by path."""
    with tarfile.open(sdist) as packed:
        members = {m.name.partition("/")[2]: m for m in packed if m.isfile()}
        return {path: packed.extractfile(member).read() for path, member in members.items()}


def sdist_file(version: Version, root: Path) -> Path:
    """Return the path of the verified sdist, which is downloaded once into ``build/cache``."""
    cache = root / "build" / "cache"
    cached = cache / (version.sdist.replace("-", "_").replace("==", "-") + ".tar.gz")
    if not cached.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            _download(version, Path(work), cached)
    if (found := sha256(cached.read_bytes())) != version.sdist_sha256:
        cached.unlink()
        wanted = version.sdist_sha256
        what = f"{cached.name} has sha256 {found}, the lock wants {wanted}: file removed"
        raise OverlayError(DIFFERS_FROM_LOCK, what)
    return cached


def archive(lock: Lock, directory: Path) -> bytes:
    """Return a tar archive of the lock's commit of main from a git directory.

    Raises:
        OverlayError: the folder is no git directory, or has not that commit.
    """
    commit = lock.next and lock.versions[lock.next].commit
    if not commit:
        raise OverlayError(NOT_THE_PIN, "the lock has no commit of main")
    if not directory.is_dir():
        raise OverlayError(FAILED, f"{directory} is not a git directory")
    found = user_git(directory, "cat-file", "-t", commit)
    if found.stdout.strip() != "commit":
        what = f"{directory} has no commit {commit}, which the lock wants: {reason(found)}"
        raise OverlayError(DIFFERS_FROM_LOCK, what)
    with tempfile.TemporaryDirectory() as work:
        target = Path(work, "next.tar")
        done = user_git(directory, "archive", f"--output={target}", commit)
        if done.returncode:
            raise OverlayError(FAILED, f"git archive of {directory} failed: {reason(done)}")
        return target.read_bytes()


def next_files(lock: Lock, directory: Path) -> dict[str, bytes]:
    """Return the files of the lock's commit of main that the patch set may change, by path."""
    with tarfile.open(fileobj=io.BytesIO(archive(lock, directory))) as packed:
        ours = ("megatron/", "examples/mimo/")
        members = [one for one in packed if one.isfile() and one.name.startswith(ours)]
        return {one.name: packed.extractfile(one).read() for one in members}


def _download(version: Version, work: Path, target: Path) -> None:
    """Let pip download an sdist, whose hash it checks."""
    requirement = work / "requirements.txt"
    requirement.write_text(f"{version.sdist} --hash=sha256:{version.sdist_sha256}\n")
    options = ["--no-deps", "--no-binary", ":all:", "--ignore-requires-python"]
    options += ["--no-build-isolation", "--require-hashes", "--dest", f"{work}/sdist"]
    for args in (
        ["install", "--target", f"{work}/build", *_BUILD_REQUIREMENTS],
        ["download", *options, "--requirement", str(requirement)],
    ):
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *args]
        env = os.environ | {"PYTHONPATH": f"{work}/build"}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
            reasons = [line for line in errors if "error" in line.lower()] or errors
            raise OverlayError(FAILED, f"pip {args[0]} failed: {reasons[-1].strip()}")
    os.replace(next(Path(work, "sdist").iterdir()), target)


def fetch(
    lock: Lock,
    root: Path,
    destination: Path,
    version: str | None,
    remote: str | None,
    directory: Path | None = None,
) -> str:
    """Make ``destination`` a checkout of a locked version; return what was done, in one line.

    With ``directory``, a git directory, it is the tree of the lock's commit of main.

    Raises:
        OverlayError: the fetched tree is not that version (nothing is kept), or the destination is
            something else.
    """
    if directory and remote:
        raise OverlayError(USAGE, "--next and --git are two sources: give one")
    version = (lock.next if directory else version) or lock.pin
    if version not in lock.versions:
        versions = " and ".join(lock.versions)
        raise OverlayError(NOT_THE_PIN, f"the lock has {versions}, not {version}")
    if version == lock.next and not directory:
        what = f"{version} is a commit of main: give a git directory that has it with --next"
        raise OverlayError(NOT_THE_PIN, what)
    if os.path.lexists(destination):
        check_version(destination, Checkout(destination).version, [version])
        return f"{destination}: already Megatron-LM {version}"
    destination.parent.mkdir(parents=True, exist_ok=True)
    part = destination.with_name(f".{destination.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        if directory:
            tree, source = part, f"commit {lock.versions[version].commit}"
            with tarfile.open(fileobj=io.BytesIO(archive(lock, directory))) as packed:
                _unpack(packed, part)
            _refuse_wrong(lock, version, tree, str(directory))
        elif remote:
            tree, source = part, _clone(lock, version, remote, part)
        else:
            sdist = sdist_file(lock.versions[version], root)
            with tarfile.open(sdist) as packed:
                _unpack(packed, part)
            (tree,), source = part.iterdir(), f"sha256 {lock.versions[version].sdist_sha256}"
        check_version(tree, Checkout(tree).version, [version])
        os.rename(tree, destination)
    except tarfile.TarError as error:
        name = directory or sdist.name
        raise OverlayError(FAILED, f"{name}: refused to unpack: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return f"{destination}: Megatron-LM {version} ({source})"


def _unpack(packed: tarfile.TarFile, folder: Path) -> None:
    """Unpack plain files and folders alone, where Python has that filter: from 3.11.4 on."""
    packed.extraction_filter = getattr(tarfile, "data_filter", None)
    packed.extractall(folder)


def _clone(lock: Lock, version: str, remote: str, into: Path) -> str:
    """Clone the tag; check its commit, if that is locked, and the files that we change."""
    wanted = lock.versions[version]
    clone = ["-c", "advice.detachedHead=false", "clone", "--quiet", "--depth", "1"]
    done = user_git(into.parent, *clone, "--branch", wanted.tag, "--", remote, str(into))
    if done.returncode:
        raise OverlayError(FAILED, f"git clone {remote} failed: {reason(done)}")
    commit = user_git(into, "rev-parse", "HEAD").stdout.strip()
    wrong = [f"the tag is commit {commit}, the lock wants {wanted.commit}"]
    wrong = wrong if wanted.commit not in ("", commit) else []
    _refuse_wrong(lock, version, into, f"{wanted.tag} at {remote}", *wrong)
    return f"commit {commit}"


def _refuse_wrong(lock: Lock, version: str, tree: Path, source: str, *wrong: str) -> None:
    """Refuse a tree of which something is wrong, or in which a file that we change is not as the
    lock has it."""
    read, locked = Checkout(tree).read, lock.files.get(version, {}).items()
    differ = [path for path, (before, _) in locked if sha256(read(path) or b"") != before]
    lines = [*wrong, *(f"{path} differs from the lock" for path in differ)]
    refuse(DIFFERS_FROM_LOCK, [f"{source}: {line}: nothing kept" for line in lines])
