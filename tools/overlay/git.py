# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Functions that run git to read, apply, make and merge patches.

git runs in temporary folders, outside any repository, and without the user's configuration and
attributes.
"""

import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

from overlay.errors import FAILED, OverlayError

CONTEXT_LINES = 1
_DIFF_LINE = re.compile(rb"^diff --git a/(.+) b/\1$", re.MULTILINE)
_CHANGED_LINE = re.compile(rb"^[+-](?!(?:\+\+|--) [ab]/)", re.MULTILINE)
_INDEX_LINE = re.compile(rb"^index .*\n", re.MULTILINE)
_HUNK_HEADING = re.compile(rb"^(@@ -\S+ \+\S+ @@).*$", re.MULTILINE)


def _run(args: list[str], cwd: Path, stdin: bytes = b"") -> subprocess.CompletedProcess:
    command = ["git", "-c", f"core.attributesFile={os.devnull}", *args]
    environment = {name: v for name, v in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_DIR": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_ATTR_NOSYSTEM": "1"}
    try:
        return subprocess.run(command, cwd=cwd, env=environment, input=stdin, capture_output=True)
    except FileNotFoundError:
        raise OverlayError(FAILED, "git is not installed: the overlay tools need it") from None


def write_files(root: Path, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def paths_of(diff: bytes) -> list[str]:
    """Return the paths that a diff changes."""
    return [path.decode() for path in _DIFF_LINE.findall(diff)]


def changed_lines(diff: bytes) -> int:
    return len(_CHANGED_LINE.findall(diff))


def apply(name: str, patch: bytes, files: dict[str, bytes]) -> tuple[dict[str, bytes], bool]:
    """Return ``files`` (path to content) with a patch applied, and whether lines had moved.

    Raises:
        OverlayError: the patch does not apply, or does more than edit these files.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_files(work, files)
        done = _run(["apply", "--verbose", "--whitespace=nowarn"], work, patch)
        if done.returncode:
            reason = re.search(rb"error: (?!while searching).*", done.stderr)
            reason = reason[0].decode(errors="replace") if reason else "no reason given"
            raise OverlayError(FAILED, f"{name}: does not apply: {reason}")
        there = {path.relative_to(work).as_posix() for path in work.rglob("*") if path.is_file()}
        if there != files.keys():
            what = f"a patch only edits existing files: {min(there ^ files.keys())}"
            raise OverlayError(FAILED, f"{name}: {what}")
        return {p: (work / p).read_bytes() for p in files}, b"(offset " in done.stderr


def diff(old: dict[str, bytes], new: dict[str, bytes]) -> bytes:
    """Return the canonical diff between two trees, so that equal trees give equal bytes.

    Algorithm and context are fixed; there are no index lines, and nothing after the hunk ranges.
    """
    options = "--no-index --no-color --no-ext-diff --no-textconv --no-renames --no-prefix"
    options += f" --diff-algorithm=histogram --indent-heuristic -U{CONTEXT_LINES}"
    with tempfile.TemporaryDirectory() as folder:
        for side, files in (("a", old), ("b", new)):
            Path(folder, side).mkdir()
            write_files(Path(folder, side), files)
        args = ["diff", *options.split(), "--inter-hunk-context=0", "--", "a", "b"]
        done = _run(args, Path(folder))
    if done.returncode not in (0, 1):
        raise OverlayError(FAILED, f"git diff failed: {done.stderr.decode(errors='replace')}")
    return _HUNK_HEADING.sub(rb"\1", _INDEX_LINE.sub(b"", done.stdout))


def merge(ours: bytes, base: bytes, theirs: bytes, *options: str) -> tuple[bytes, bool]:
    """Return ``ours`` with the change from ``base`` to ``theirs``, and whether it was clean.

    ``options`` are those of ``git merge-file``.
    """
    with tempfile.TemporaryDirectory() as folder:
        versions = {"ours": ours, "base": base, "theirs": theirs}
        write_files(Path(folder), versions)
        done = _run(["merge-file", "-p", "-q", *options, *versions], Path(folder))
    if done.returncode > 127:
        reason = done.stderr.decode(errors="replace")
        raise OverlayError(FAILED, f"git merge-file failed: {reason}")
    return done.stdout, done.returncode == 0


def is_committed(repository: Path, path: str, data: bytes) -> bool:
    """Return whether ``path`` has the content ``data`` in the last commit of ``repository``."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    done = user_git(repository, "rev-parse", "--verify", "--quiet", f"HEAD:{path}")
    return done.returncode == 0 and done.stdout.strip() == blob


def user_git(folder: Path, *args: str) -> subprocess.CompletedProcess:
    """Run git with the user's configuration, in a folder of the user's."""
    ours = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(["git", *args], cwd=folder, env=env, capture_output=True, text=True)


def reason(done: subprocess.CompletedProcess) -> str:
    """Return the last line that a failed process said, on stderr if it said anything there."""
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return said[-1].strip() if said else "no reason given"
