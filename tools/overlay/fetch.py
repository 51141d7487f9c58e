# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fetch the pinned upstream: the package's sdist, or a clone of the tag, verified before use.

The tree is prepared beside its destination and renamed: the destination is whole or absent.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from overlay.checkout import Checkout, sha256
from overlay.errors import DIFFERS_FROM_LOCK, FAILED, OverlayError
from overlay.patchset import Lock

# What upstream's build needs: pip reads an sdist's metadata by running its build. Given them, pip
# need not make an isolated environment with all of torch in it.
_BUILD_REQUIREMENTS = ["setuptools>=80", "pybind11", "packaging>=24.2"]


def sdist_file(lock: Lock, root: Path) -> Path:
    """The pinned sdist, verified, downloaded once into ``build/cache``."""
    cache = root / "build" / "cache"
    cached = cache / (lock.sdist.replace("-", "_").replace("==", "-") + ".tar.gz")
    if not cached.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            downloaded = _download(lock, Path(work))
            _verify(downloaded, lock)
            os.replace(downloaded, cached)
    _verify(cached, lock)
    return cached


def _verify(path: Path, lock: Lock) -> None:
    found = sha256(path.read_bytes())
    if found != lock.sdist_sha256:
        path.unlink()
        raise OverlayError(
            DIFFERS_FROM_LOCK,
            f"{path.name} has sha256 {found}, the lock wants {lock.sdist_sha256}: file removed",
        )


def _download(lock: Lock, work: Path) -> Path:
    requirement = work / "requirements.txt"
    requirement.write_text(f"{lock.sdist} --hash=sha256:{lock.sdist_sha256}\n")
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


def fetch(lock: Lock, root: Path, destination: Path, remote: str | None) -> str:
    """Make ``destination`` a checkout of the pin; returns what was done, in a line.

    Raises:
        OverlayError: what came is not the pin (nothing is left), or something else lies there.
    """
    if os.path.lexists(destination):
        Checkout(destination, lock.version)
        return f"{destination}: already Megatron-LM {lock.version}"
    destination.parent.mkdir(parents=True, exist_ok=True)
    part = destination.with_name(f".{destination.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        if remote:
            _clone(lock, remote, part)
            tree, source = part, lock.commit
        else:
            _unpack(sdist_file(lock, root), part)
            (tree,) = part.iterdir()
            source = f"sha256 {lock.sdist_sha256}"
        Checkout(tree, lock.version)
        os.rename(tree, destination)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return f"{destination}: Megatron-LM {lock.version} ({source})"


def _unpack(sdist: Path, into: Path) -> None:
    try:
        with tarfile.open(sdist) as archive:
            archive.extractall(into, filter="data")
    except tarfile.TarError as error:
        raise OverlayError(FAILED, f"{sdist.name}: refused to unpack: {error}") from None


def _clone(lock: Lock, remote: str, into: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_DIR")}
    clone = ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", "--depth", "1"]
    clone += ["--branch", lock.tag, "--", remote, str(into)]
    done = subprocess.run(clone, env=env, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines() or ["no output"]
        raise OverlayError(FAILED, f"git clone {remote} failed: {reason[-1]}")
    head = ["git", "-C", str(into), "rev-parse", "HEAD"]
    found = subprocess.run(head, env=env, capture_output=True, text=True, check=True).stdout.strip()
    if found != lock.commit:
        raise OverlayError(
            DIFFERS_FROM_LOCK,
            f"{lock.tag} at {remote} is commit {found}, the lock wants {lock.commit}: nothing kept",
        )
