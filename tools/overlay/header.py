# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The header of a patch file: why the patch exists, and when it may be dropped."""

import re

from overlay.errors import FAILED, OverlayError

REQUIRED = ("Description", "Feature", "Upstream-Status", "Drop-When")
EXPLANATION = "Why-Not-A-Hook"
HOOK_LINES = 40  # most changed lines of a patch that counts as a hook
MOST_PATCHES, MOST_LINES = 25, 450  # limits of the whole set
_STATUS = re.compile(r"pending|submitted PR#\d+|landed in \S+")


def split(patch: bytes) -> tuple[bytes, bytes]:
    """Split a patch file into header and diff; either may be empty."""
    start = 0 if patch.startswith(b"diff --git ") else patch.find(b"\ndiff --git ") + 1
    if start == 0 and not patch.startswith(b"diff --git "):
        return patch, b""
    return patch[:start], patch[start:]


def join(header: bytes, diff: bytes) -> bytes:
    """Return a patch file in canonical form: header without stray blanks, blank line, diff."""
    lines = [line.rstrip() for line in header.strip().splitlines()]
    return b"\n".join(lines) + b"\n\n" + diff


def fields(name: str, header: bytes) -> dict[str, str]:
    """Parse header fields; a line that starts with a blank continues the field above it."""
    found: dict[str, str] = {}
    key = None
    for line in header.decode().strip().splitlines():
        if line.startswith((" ", "\t")) and key:
            found[key] += " " + line.strip()
            continue
        key, colon, value = line.partition(":")
        if not colon or key not in (*REQUIRED, EXPLANATION) or key in found:
            raise OverlayError(FAILED, f"patches/{name}: unknown or repeated header line {line!r}")
        found[key] = value.strip()
    return found


def problems(name: str, patch: bytes, changed_lines: int) -> list[str]:
    """Return the errors in the header of a patch that changes ``changed_lines`` lines."""
    found = fields(name, split(patch)[0])
    lines = [f"patches/{name}: no {key} in the header" for key in REQUIRED if not found.get(key)]
    status = found.get("Upstream-Status", "")
    if status and not _STATUS.fullmatch(status):
        lines.append(
            f"patches/{name}: Upstream-Status is {status!r}, "
            " not pending, submitted PR#N or landed in X"
        )
    if changed_lines > HOOK_LINES and not found.get(EXPLANATION):
        lines.append(
            f"patches/{name}: {changed_lines} changed lines (over {HOOK_LINES}), no {EXPLANATION}"
        )
    return lines


def problems_of_all(patches: int, changed_lines: int) -> list[str]:
    """Return the limits that the size of the whole set exceeds."""
    sizes = [(patches, MOST_PATCHES, "patches"), (changed_lines, MOST_LINES, "changed lines")]
    return [f"patches: {n} {what}, over {most}" for n, most, what in sizes if n > most]
