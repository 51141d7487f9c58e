# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Comparison of the patch set with another Megatron-LM tree, without changing anything."""

import gc
import tempfile
from pathlib import Path

from overlay import git, series
from overlay.checkout import STATE_DIR, Checkout
from overlay.errors import DIFFERS_FROM_LOCK, OverlayError
from overlay.fetch import upstream
from overlay.names import Version, compare
from overlay.patchset import PatchSet

_NOTHING_TO_DO = ("applies", "left out", "unchanged")
_PLACES = 4  # most places of use that the table shows
Row = tuple[str, str, str, list[str]]  # state, name, detail, where: files, or places of use


def drift(patchset: PatchSet, checkout: Checkout) -> tuple[list[str], int]:
    """Compare the pin with a pristine tree of another version.

    Return the report's lines, and 1 if there is work to do, else 0. The report has only the names
    that need work.

    Raises:
        OverlayError: the tree has the overlay applied.
    """
    if (checkout.root / STATE_DIR).exists():
        what = f"{checkout.root} has the overlay applied: revert it first"
        raise OverlayError(DIFFERS_FROM_LOCK, what)
    lock, root = patchset.lock, checkout.root
    old = upstream(lock, lock.pin, patchset.root)
    sources = patchset.sources("tests", "tools/checkpoint")
    ours = {path: source.read_bytes() for path, source in sources.items()}
    gc.disable()  # a third of the time, for objects that live to the end
    with tempfile.TemporaryDirectory() as folder:
        git.write_files(Path(folder), old)
        found = compare(ours, Version(Path(folder)), Version(root))
    gc.enable()
    names = sorted((*key, places) for key, places in found.items())
    patched = series.build(patchset.series(checkout.version), checkout.read)
    patches = list(map(_patch_state, patched))
    replaced = [path for path in patchset.overlay if path.startswith("megatron/")]
    states = {path: _file_state(old.get(path), checkout.read(path)) for path in sorted(replaced)}
    files = [(state, path, "", []) for path, state in states.items() if state]
    lines = [f"Megatron-LM {checkout.version} against the pin {lock.pin}"]
    for title, rows in (
        (f"patches ({len(patches)})", patches),
        (f"overlay files that replace upstream's ({len(files)})", files),
        (f"upstream's names that our code uses: {len(names)} changed", names),
    ):
        lines += ["", title, *_table(rows)]
    work = bool(names) or any(state not in _NOTHING_TO_DO for state, *_ in patches + files)
    return lines, int(work)


def _table(rows: list[Row]) -> list[str]:
    width, lines = max((len(state) for state, *_ in rows), default=0), []
    for state, name, detail, where in rows:
        lines.append(f"  {state:{width}}  {name}")
        more = f" and {len(where) - _PLACES} more" if len(where) > _PLACES else ""
        for text in (detail, ", ".join(where[:_PLACES]) + more):
            lines += [f"  {'':{width}}    {line}" for line in text.splitlines()]
    return lines


def _patch_state(patch: series.Patched) -> Row:
    if not patch.problem:
        return "left out" if patch.left_out else "applies", patch.name, "", []
    try:
        git.apply(patch.name, patch.diff, patch.before, "--reverse")
    except OverlayError:
        return "conflicts", patch.name, patch.problem, git.paths_of(patch.diff)
    return "already there", patch.name, "", []


def _file_state(before: bytes | None, after: bytes | None) -> str:
    """Return what has become of a file of upstream's at the path of ours; empty without one."""
    if before == after:
        return "unchanged" if after else ""
    if before is None:
        return "new upstream"
    return "gone upstream" if after is None else "changed upstream"
