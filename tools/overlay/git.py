# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Functions that let git apply and make patches of files in memory, and work in a checkout.

For patches, git runs in temporary folders, outside any repository, and without the user's
configuration and attributes.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

from overlay.errors import FAILED, OverlayError

Files = dict[str, bytes]  # contents by path
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


def call(folder: Path, *args: str, stdin: bytes = b"") -> str:
    """Run git without the hooks of the user, who must have a name to sign off with."""
    settings = ("-c", "user.useConfigOnly=true", "-c", f"core.hooksPath={os.devnull}")
    done = subprocess.run(["git", *settings, *args], cwd=folder, input=stdin, capture_output=True)
    if done.returncode:
        said = (done.stderr or done.stdout).decode().strip()
        raise OverlayError(FAILED, f"git {args[0]}: {said.splitlines()[-1] if said else 'failed'}")
    return done.stdout.decode().strip()


def write_files(root: Path, files: Files) -> None:
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def paths_of(diff: bytes) -> list[str]:
    """Return the paths that a diff changes."""
    return [path.decode() for path in _DIFF_LINE.findall(diff)]


def changed_lines(diff: bytes) -> int:
    return len(_CHANGED_LINE.findall(diff))


def apply(name: str, patch: bytes, files: Files, *options: str) -> Files:
    """Return ``files`` with a patch applied, whose hunks may give wrong counts of lines.

    Raises:
        OverlayError: the patch does not apply, or does more than edit these files.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_files(work, files)
        done = _run(["apply", "--recount", "--whitespace=nowarn", *options], work, patch)
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason"]
            raise OverlayError(FAILED, f"{name}: does not apply: {reason[0]}")
        made = [path for path in work.rglob("*") if path.is_symlink() or not path.is_dir()]
        there = {path.relative_to(work).as_posix() for path in made}
        if there != files.keys():
            what = f"a patch only edits existing files: {min(there ^ files.keys())}"
            raise OverlayError(FAILED, f"{name}: {what}")
        return {path: (work / path).read_bytes() for path in files}


def diff(old: Files, new: Files) -> bytes:
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
        text = _run(args, Path(folder)).stdout
    return _HUNK_HEADING.sub(rb"\1", _INDEX_LINE.sub(b"", text))
