# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Comparison of the patch set with another Megatron-LM tree, without changing anything."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field

from overlay import git, series
from overlay.checkout import STATE_DIR, Checkout
from overlay.errors import DIFFERS_FROM_LOCK, OverlayError
from overlay.fetch import upstream
from overlay.names import Version, compare
from overlay.patchset import NEXT, PatchSet

_NOTHING_TO_DO = ("applies", "left out", "unchanged")
_PLACES = 4  # most places of use that the table shows


@dataclass
class Finding:
    """A patch, an overlay file, or a name: its state, and where (files, or places of use)."""

    name: str
    state: str
    detail: str = ""
    where: list[str] = field(default_factory=list)


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
    lock = patchset.lock
    old = upstream(lock, lock.pin, patchset.root)
    patched = series.build(patchset.series(), old.get)
    sources = patchset.sources("tests", "tools/checkpoint")
    ours = {path: source.read_bytes() for path, source in sources.items()}
    root = checkout.root
    new = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.glob("megatron/**/*.py")}
    gc.disable()  # a third of the time, for objects that live to the end
    found = compare(ours, Version(old), Version(new))
    gc.enable()
    names = [Finding(name, kind, text, places) for (kind, name, text), places in found.items()]
    names.sort(key=lambda row: (row.state, row.name))
    own = {name.removeprefix(NEXT): text for name, text in patchset.texts.items() if NEXT in name}
    own = own if checkout.version == lock.next else {}
    ported = series.port(patched, checkout.read, own)
    patches = [Finding(one.name, state, where=paths) for one, state, paths in ported]
    files = list(_files(patchset, old, checkout))
    lines = [f"Megatron-LM {checkout.version} against the pin {lock.pin}"]
    for title, rows in (
        (f"patches ({len(patches)})", patches),
        (f"overlay files that replace upstream's ({len(files)})", files),
        (f"upstream's names that our code uses: {len(names)} changed", names),
    ):
        lines += ["", title, *_table(rows)]
    work = bool(names) or any(row.state not in _NOTHING_TO_DO for row in patches + files)
    return lines, int(work)


def _table(rows: list[Finding]) -> list[str]:
    width, lines = max((len(row.state) for row in rows), default=0), []
    for row in rows:
        lines.append(f"  {row.state:{width}}  {row.name}")
        more = f" and {len(row.where) - _PLACES} more" if len(row.where) > _PLACES else ""
        for text in (row.detail, ", ".join(row.where[:_PLACES]) + more):
            lines += [f"  {'':{width}}    {line}" for line in text.splitlines()]
    return lines


def _files(patchset: PatchSet, old: git.Files, checkout: Checkout) -> Iterator[Finding]:
    """Yield the overlay files that replace upstream's in either version."""
    for path in sorted(path for path in patchset.overlay if path.startswith("megatron/")):
        before, after = old.get(path), checkout.read(path)
        if before == after:
            state = "unchanged"
        elif before is None:
            state = "new upstream"
        else:
            state = "gone upstream" if after is None else "changed upstream"
        if (before, after) != (None, None):
            yield Finding(path, state)
