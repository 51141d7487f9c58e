# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fetch a locked upstream: the package's sdist, or a clone of the tag, verified before use.

The tree is prepared beside its destination and then renamed: the destination is complete or absent.
"""

import functools
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from overlay.checkout import Checkout, digest, sha256
from overlay.errors import DIFFERS_FROM_LOCK, FAILED, NOT_THE_PIN, OverlayError
from overlay.git import user_git
from overlay.patchset import Lock, Version, check_version

# Requirements of upstream's build, which pip runs to read an sdist's metadata. Given these, pip
# need not make an isolated environment with all of torch in it.
_BUILD_REQUIREMENTS = ["setuptools>=80", "pybind11", "packaging>=24.2"]


def upstream(lock: Lock, version: str, root: Path) -> dict[str, bytes]:
    """Return the files of a locked version from its sdist, by path."""
    return _files(sdist_file(lock.versions[version], root))


@functools.cache
def _files(sdist: Path) -> dict[str, bytes]:
    with tarfile.open(sdist) as archive:
        members = {m.name.partition("/")[2]: m for m in archive if m.isfile()}
        return {path: archive.extractfile(member).read() for path, member in members.items()}


def sdist_file(version: Version, root: Path) -> Path:
    """Return the path of the verified sdist, which is downloaded once into ``build/cache``."""
    cache = root / "build" / "cache"
    cached = cache / (version.sdist.replace("-", "_").replace("==", "-") + ".tar.gz")
    if not cached.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            downloaded = _download(version, Path(work))
            _verify(downloaded, version)
            os.replace(downloaded, cached)
    _verify(cached, version)
    return cached


def _verify(path: Path, version: Version) -> None:
    found = sha256(path.read_bytes())
    if found != version.sdist_sha256:
        path.unlink()
        raise OverlayError(
            DIFFERS_FROM_LOCK,
            f"{path.name} has sha256 {found}, the lock wants {version.sdist_sha256}: file removed",
        )


def _download(version: Version, work: Path) -> Path:
    requirement = work / "requirements.txt"
    requirement.write_text(f"{version.sdist} --hash=sha256:{version.sdist_sha256}\n")
    _pip(["install", "--target", f"{work}/build", *_BUILD_REQUIREMENTS], work)
    options = ["--no-deps", "--no-binary", ":all:", "--ignore-requires-python"]
    options += ["--no-build-isolation", "--require-hashes", "--dest", f"{work}/sdist"]
    _pip(["download", *options, "--requirement", str(requirement)], work)
    return next(Path(work, "sdist").iterdir())


def _pip(args: list[str], work: Path) -> None:
    env = os.environ | {"PYTHONPATH": f"{work}/build"}
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        reasons = [line for line in errors if "error" in line.lower()] or errors or ["no output"]
        raise OverlayError(FAILED, f"pip {args[0]} failed: {reasons[-1].strip()}")


def fetch(
    lock: Lock, root: Path, destination: Path, version: str | None, remote: str | None
) -> str:
    """Make ``destination`` a checkout of a locked version; return what was done, in one line.

    Raises:
        OverlayError: the fetched tree is not that version (nothing is kept), or the destination is
            something else.
    """
    version = version or lock.pin
    if version not in lock.versions:
        versions = " and ".join(lock.versions)
        raise OverlayError(NOT_THE_PIN, f"the lock has {versions}, not {version}")
    if os.path.lexists(destination):
        check_version(destination, Checkout(destination).version, [version])
        return f"{destination}: already Megatron-LM {version}"
    destination.parent.mkdir(parents=True, exist_ok=True)
    part = destination.with_name(f".{destination.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        if remote:
            tree, source = part, _clone(lock, version, remote, part)
        else:
            _unpack(sdist_file(lock.versions[version], root), part)
            (tree,) = part.iterdir()
            source = f"sha256 {lock.versions[version].sdist_sha256}"
        check_version(tree, Checkout(tree).version, [version])
        os.rename(tree, destination)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return f"{destination}: Megatron-LM {version} ({source})"


def _unpack(sdist: Path, into: Path) -> None:
    try:
        with tarfile.open(sdist) as archive:
            archive.extractall(into, filter="data")
    except tarfile.TarError as error:
        raise OverlayError(FAILED, f"{sdist.name}: refused to unpack: {error}") from None


def _clone(lock: Lock, version: str, remote: str, into: Path) -> str:
    """Clone the tag, and check its commit or, if not locked, the files that we change."""
    wanted = lock.versions[version]
    clone = ["-c", "advice.detachedHead=false", "clone", "--quiet", "--depth", "1"]
    done = user_git(into.parent, *clone, "--branch", wanted.tag, "--", remote, str(into))
    if done.returncode:
        reason = done.stderr.strip().splitlines() or ["no output"]
        raise OverlayError(FAILED, f"git clone {remote} failed: {reason[-1]}")
    commit = user_git(into, "rev-parse", "HEAD").stdout.strip()
    if wanted.commit:
        if commit != wanted.commit:
            raise OverlayError(
                DIFFERS_FROM_LOCK,
                f"{wanted.tag} at {remote} is commit {commit}, the lock wants {wanted.commit}: "
                "nothing kept",
            )
        return commit
    checkout, files = Checkout(into), lock.changed_in(version)
    files = {path: sides for path, sides in files.items() if path not in lock.git_only()}
    for path, (before, _) in files.items():
        if digest(checkout.look(path)) != before:
            raise OverlayError(
                DIFFERS_FROM_LOCK,
                f"{wanted.tag} at {remote}: {path} differs from the lock: nothing kept",
            )
    return f"commit {commit}, not in the lock: its {len(files)} files that we change are as locked"
