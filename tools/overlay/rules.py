# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The rules for what changes upstream: headers and sizes of patches, replacements at run time."""

import re
import tomllib
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

from overlay import git
from overlay.errors import FAILED, refuse
from overlay.patchset import PatchSet
from overlay.series import split
from overlay.source import module_name, prefixes, uses

EXPLANATION = "Why-Not-A-Hook"
REQUIRED = ("Description", "Feature", "Upstream-Status", "Drop-When")
HOOK_LINES = 40  # most changed lines of a patch that counts as a hook
MOST_PATCHES, MOST_LINES, MOST_REPLACEMENTS = 26, 470, 9  # limits of the whole set
DECLARED = "patches/runtime.toml"
PACKAGES = ("megatron.", "torch.", "triton.", "*.")
TAKEN = re.compile(r"\*\.\w+_func")  # a configuration's fields for functions
CPU_RUNTIME = "megatron/core/cpu_runtime/"  # its tables list what it replaces, for all of a process
_STATUS = re.compile(r"pending|submitted PR#\d+|landed in \S+|")


def check(patchset: PatchSet) -> str:
    """Check every patch, the sizes of the set, and the declared replacements; return their counts.

    Raises:
        OverlayError: there are errors; it has a line for each.
    """
    wrong, total, patches = [], 0, patchset.series()
    replaced = declared(patchset.root)
    for name, patch in patchset.texts.items():
        header, diff = split(patch)
        changed = git.changed_lines(diff)
        total += changed if name in patches else 0
        empty = ["it changes nothing: fill or delete it"] * (name in patches and not diff)
        wrong += [f"patches/{name}: {problem}" for problem in [*empty, *_header(header, changed)]]
    for number, most, what in (
        (len(patches), MOST_PATCHES, "patches: {} patches, over {}"),
        (total, MOST_LINES, "patches: {} changed lines, over {}"),
        (len(replaced), MOST_REPLACEMENTS, DECLARED + ": {} replacements, over {}"),
    ):
        wrong += [what.format(number, most)] if number > most else []
    wrong += _replacements(replaced, set(_in_product(patchset)))
    refuse(FAILED, wrong)
    return (
        f"{len(patches)} patch headers are in order, {total} changed lines; "
        f"{len(replaced)} replacements at run time are declared"
    )


def _header(header: bytes, changed_lines: int) -> Iterator[str]:
    """Yield the errors in the header of a patch that changes ``changed_lines`` lines.

    It has the form of a mail's header: a line that begins with a blank continues the one above.
    """
    mail = message_from_bytes(header.strip())
    names, known = mail.keys(), (*REQUIRED, EXPLANATION)
    wrong = [name for name in dict.fromkeys(names) if name not in known or names.count(name) > 1]
    wrong = [*mail.get_payload().strip().splitlines()[:1], *wrong]
    yield from (f"unknown or repeated header line {line!r}" for line in wrong)
    yield from (f"no {name} in the header" for name in REQUIRED if not mail.get(name))
    if not _STATUS.fullmatch(status := mail.get("Upstream-Status", "")):
        form = "pending, submitted PR#N or landed in X"
        yield f"Upstream-Status is {status!r}, not {form}"
    if changed_lines > HOOK_LINES and not mail.get(EXPLANATION):
        yield f"{changed_lines} changed lines (over {HOOK_LINES}), no {EXPLANATION}"


def declared(root: Path) -> dict[str, dict]:
    """Return the declared replacements by upstream's dotted name; none without the file."""
    path = root / DECLARED
    return tomllib.loads(path.read_text()) if path.exists() else {}


def _replacements(known: dict[str, dict], found: set[tuple[str, str]]) -> Iterator[str]:
    """Yield fields that the declaration lacks, and its differences from the source."""
    for name, entry in known.items():
        missing = [field for field in ("by", EXPLANATION, "Drop-When") if not entry.get(field)]
        yield from (f"{DECLARED}: {name} has no {field}" for field in missing)
    listed = {(name, path) for name, entry in known.items() for path in entry.get("by", [])}
    for name, path in sorted(found - listed):
        yield f"{path} replaces {name}: not in {DECLARED}"
    for name, path in sorted(listed - found):
        yield f"{DECLARED}: {path} does not replace {name}"


def _in_product(patchset: PatchSet) -> Iterator[tuple[str, str]]:
    """Yield each replacement of upstream's in product code: upstream's name, path of our file."""
    sources = patchset.sources("tools/checkpoint")
    ours = {module_name(path) for path in sources}
    for path, source in sources.items():
        if path.startswith(CPU_RUNTIME):
            continue
        for name in replaced_in(source.read_bytes(), path):
            if not ours & prefixes(name):
                yield name, source.relative_to(patchset.root).as_posix()


def replaced_in(source: str | bytes, path: str) -> set[str]:
    """Return the names of Megatron, PyTorch and Triton that the file at ``path`` replaces; and
    ``*.name`` for functions and classes that it gives to objects of others."""
    found = {use.name for use in uses(source, path) if use.replaces}
    return {name for name in found if name.startswith(PACKAGES) and not TAKEN.fullmatch(name)}
