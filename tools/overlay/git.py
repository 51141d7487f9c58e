# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""git as a library: it reads, applies, makes and merges patches, so that no code of ours must."""

import os
import re
import subprocess
from pathlib import Path

from overlay.errors import FAILED, OverlayError

CONTEXT_LINES = 1
_INDEX_LINE = re.compile(rb"^index .*\n", re.MULTILINE)
_HUNK_HEADING = re.compile(rb"^(@@ -\S+ \+\S+ @@).*$", re.MULTILINE)


def _run(args: list[str], cwd: Path, stdin: bytes = b"") -> subprocess.CompletedProcess:
    """Run git outside any repository (GIT_DIR is void) and without the user's configuration."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_DIR": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    env |= {"LC_ALL": "C"}
    try:
        return subprocess.run(["git", *args], cwd=cwd, env=env, input=stdin, capture_output=True)
    except FileNotFoundError:
        raise OverlayError(FAILED, "git is not installed: the overlay tools need it") from None


def _first_line(output: bytes) -> str:
    return output.decode(errors="replace").strip().partition("\n")[0]


def touched(name: str, patch: bytes, cwd: Path) -> dict[str, int]:
    """Paths that a patch touches, with the number of lines it adds and deletes in each.

    Raises:
        OverlayError: git cannot read it, or it does more than edit the text of existing files.
    """
    counts = _run(["apply", "--numstat", "-z"], cwd, patch)
    summary = _run(["apply", "--summary"], cwd, patch)
    if counts.returncode:
        raise OverlayError(FAILED, f"{name}: git cannot read it: {_first_line(counts.stderr)}")
    if summary.stdout.strip():
        what = _first_line(summary.stdout)
        raise OverlayError(FAILED, f"{name}: a patch only edits existing files, this would {what}")
    result = {}
    for record in counts.stdout.decode().split("\0")[:-1]:
        added, deleted, path = record.split("\t")
        if added == "-":
            raise OverlayError(FAILED, f"{name}: {path}: a binary patch is not reviewable")
        result[path] = int(added) + int(deleted)
    return result


def apply(name: str, patch: bytes, tree: Path) -> None:
    """Apply one patch to the files under ``tree``, all of it or nothing."""
    done = _run(["apply", "--whitespace=nowarn"], tree, patch)
    if done.returncode:
        raise OverlayError(FAILED, f"{name}: does not apply: {_first_line(done.stderr)}")


def diff(old: str, new: str, cwd: Path) -> bytes:
    """The canonical diff between two folders or files below ``cwd``: fixed algorithm and context,
    no index lines, no headings behind the hunk ranges, so that equal trees give equal bytes."""
    done = _run(
        ["diff", "--no-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames"]
        + ["--no-prefix", "--diff-algorithm=histogram", "--indent-heuristic"]
        + [f"-U{CONTEXT_LINES}", "--inter-hunk-context=0", "--", old, new],
        cwd,
    )
    if done.returncode not in (0, 1):
        raise OverlayError(FAILED, f"git diff failed: {_first_line(done.stderr)}")
    return _HUNK_HEADING.sub(rb"\1", _INDEX_LINE.sub(b"", done.stdout))


def merge(ours: Path, base: Path, theirs: Path) -> bytes | None:
    """``ours`` with the change from ``base`` to ``theirs``, or None where they conflict."""
    done = _run(["merge-file", "-p", str(ours), str(base), str(theirs)], ours.parent)
    return done.stdout if done.returncode == 0 else None


def blob_in_commit(repository: Path, commit: str, path: str) -> str | None:
    """The object id that ``path`` has in ``commit``, or None where there is no such thing."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    args = ["git", "-C", str(repository), "rev-parse", "--verify", "--quiet", f"{commit}:{path}"]
    done = subprocess.run(args, env=env, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
