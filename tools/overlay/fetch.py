# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fetch a locked upstream, an sdist or a commit of main, verified before use.

The tree is prepared beside its destination and then renamed: the destination is complete or absent.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from overlay import git
from overlay.checkout import Checkout, sha256
from overlay.errors import DIFFERS_FROM_LOCK, FAILED, NOT_THE_PIN, OverlayError
from overlay.git import Files
from overlay.patchset import Lock, Version

# Requirements of upstream's build, which pip runs to read an sdist's metadata. Given these, pip
# need not make an isolated environment with all of torch in it.
_BUILD_REQUIREMENTS = ["setuptools>=80", "pybind11", "packaging>=24.2"]


def upstream(lock: Lock, version: str, root: Path) -> Files | None:
    """Return the files of a locked version by path; None for a commit that was not fetched."""
    if (path := packed(lock.versions[version], root)) is None:
        return None
    with tarfile.open(path) as tar:
        members = {m.name.partition("/")[2]: m for m in tar if m.isfile()}
        return {path: tar.extractfile(member).read() for path, member in members.items()}


def packed(version: Version, root: Path, directory: Path | None = None) -> Path | None:
    """Return the path of a version's verified archive, which is made once, in ``build/cache``.

    pip downloads an sdist. A commit comes from a git directory; without one, there is None.
    """
    sdist, commit = version.get("sdist"), version.get("commit")
    name = sdist and sdist.replace("-", "_").replace("==", "-") + ".tar.gz"
    cached = root / "build/cache" / (name or f"main-{commit}.tar")
    if not cached.is_file():
        if not sdist and not directory:
            return None
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as work:
            made = Path(work, "main.tar")
            if sdist:
                made = _download(version, Path(work))
            else:  # the id of a commit is its hash
                pack = ["archive", "--prefix=main/", f"--output={made.resolve()}", commit]
                git.call(directory, *pack)
            os.replace(made, cached)
    wanted, found = version.get("sdist_sha256"), sdist and sha256(cached.read_bytes())
    if found != wanted:
        cached.unlink()
        what = f"{cached.name} has sha256 {found}, the lock wants {wanted}"
        raise OverlayError(DIFFERS_FROM_LOCK, f"{what}: file removed")
    return cached


def _download(version: Version, work: Path) -> Path:
    """Let pip download an sdist, whose hash it checks."""
    requirement = work / "requirements.txt"
    requirement.write_text("{sdist} --hash=sha256:{sdist_sha256}\n".format(**version))
    options = ["--no-deps", "--no-binary", ":all:", "--ignore-requires-python"]
    options += ["--no-build-isolation", "--require-hashes", "--dest", f"{work}/sdist"]
    for args in (
        ["install", "--target", f"{work}/build", *_BUILD_REQUIREMENTS],
        ["download", *options, "--requirement", str(requirement)],
    ):
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *args]
        environment = os.environ | {"PYTHONPATH": f"{work}/build"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["no reason given"]
            errors = [line for line in said if "error" in line.lower()] or said
            raise OverlayError(FAILED, f"pip {args[0]} failed: {errors[-1].strip()}")
    return next(Path(work, "sdist").iterdir())


def fetch(
    lock: Lock,
    root: Path,
    destination: Path,
    version: str | None = None,
    directory: Path | None = None,
) -> str:
    """Make ``destination`` a tree of a locked version; return what was done, in one line.

    directory: a git directory that has the lock's commit of main, which is then the version.

    Raises:
        OverlayError: the fetched tree is not that version (nothing is kept), or the destination is
            something else.
    """
    version = (lock.next if directory else version) or lock.pin
    if version not in lock.versions:
        versions = " and ".join(lock.versions)
        raise OverlayError(NOT_THE_PIN, f"the lock has {versions}, not {version}")
    if directory:
        packed(lock.versions[version], root, directory)  # refresh needs it, too
    if os.path.lexists(destination):
        Checkout(destination).check_version([version])
        return f"{destination}: already Megatron-LM {version}"
    path = packed(lock.versions[version], root, directory)
    if path is None:
        what = f"{version} is a commit of main: give a git directory that has it with --next"
        raise OverlayError(NOT_THE_PIN, what)
    destination.parent.mkdir(parents=True, exist_ok=True)
    part = destination.with_name(f".{destination.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with tarfile.open(path) as tar:  # of plain files and folders alone
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(part)
        (tree,) = part.iterdir()
        Checkout(tree).check_version([version])
        os.rename(tree, destination)
    except tarfile.TarError as error:
        raise OverlayError(FAILED, f"{path.name}: refused to unpack: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return f"{destination}: Megatron-LM {version} (from {path.name})"
