# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Comparison of the patch set with another Megatron-LM tree, without changing anything."""

import contextlib
import functools
import json
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from overlay import git, series
from overlay.checkout import STATE_DIR, Checkout
from overlay.errors import DIFFERS_FROM_LOCK, OverlayError
from overlay.fetch import packed_files, sdist_file, upstream
from overlay.names import Version, compare
from overlay.patchset import PatchSet
from overlay.series import Patched
from overlay.source import functions, module_name

_NOTHING_TO_DO = ("applies", "applies with offset", "left out", "unchanged")
_PLACES = 4  # most places of use that the table shows


@dataclass
class Finding:
    """A patch, an overlay file, or a name: its state, and where (files, or places of use)."""

    name: str
    state: str
    detail: str = ""
    where: list[str] = field(default_factory=list)


def drift(patchset: PatchSet, checkout: Checkout, as_json: bool = False) -> tuple[list[str], int]:
    """Compare the pin with a pristine tree of another version.

    Return the report's lines, and 1 if there is work to do, else 0. The report has only the names
    that need work.

    Raises:
        OverlayError: the tree has the overlay applied.
    """
    if (checkout.root / STATE_DIR).exists():
        what = f"{checkout.root} has the overlay applied: revert it first"
        raise OverlayError(DIFFERS_FROM_LOCK, what)
    lock, root = patchset.lock, patchset.root
    old = upstream(lock, lock.pin, root)
    pin, other = version_of(sdist_file(lock.versions[lock.pin], root)), Version(checkout.root)
    sources = patchset.sources("tests", "tools/checkpoint")
    ours = {path: source.read_bytes() for path, source in sources.items()}
    patched = series.build(patchset.series(), old.get, lock.git_only)
    found = compare(ours, pin, other, _patched_functions(patched))
    names = [Finding(name, kind, text, places) for (kind, name, text), places in found.items()]
    names.sort(key=lambda row: (row.state, row.name))
    patches = _patches(patchset, patched, checkout)
    files = _files(patchset, old, checkout, (pin, other))
    new_files = len(patchset.overlay) - len(files)
    work = bool(names) or any(row.state not in _NOTHING_TO_DO for row in patches + files)
    if as_json:
        report = {"pin": lock.pin, "version": checkout.version, "new_files": new_files}
        for name, rows in (("patches", patches), ("files", files), ("names", names)):
            report[name] = [asdict(row) for row in rows]
        return [json.dumps(report, indent=1)], int(work)
    lines = [f"Megatron-LM {checkout.version} against the pin {lock.pin}"]
    for title, rows in (
        (f"patches ({len(patches)})", patches),
        (f"overlay files that replace upstream's; {new_files} others are new", files),
        (f"upstream's names that our code uses: {len(names)} changed", names),
    ):
        lines += ["", title, *_table(rows)]
    return lines, int(work)


@functools.cache
def version_of(sdist: Path) -> Version:
    """Return the names of an sdist's Megatron."""
    with tempfile.TemporaryDirectory() as folder:
        files = packed_files(sdist).items()
        git.write_files(Path(folder), {p: data for p, data in files if p.startswith("megatron/")})
        return Version(Path(folder))


def _table(rows: list[Finding]) -> list[str]:
    width, lines = max((len(row.state) for row in rows), default=0), []
    for row in rows:
        lines.append(f"  {row.state:{width}}  {row.name}")
        more = f" and {len(row.where) - _PLACES} more" if len(row.where) > _PLACES else ""
        for text in (row.detail, ", ".join(row.where[:_PLACES]) + more):
            lines += [f"  {'':{width}}    {line}" for line in text.splitlines()]
    return lines


def _patches(patchset: PatchSet, patched: list[Patched], checkout: Checkout) -> list[Finding]:
    """Return how each patch gets onto the checkout, upon those before it.

    The next version has patches of its own, and all apply.
    """
    if checkout.version == patchset.lock.next:
        with contextlib.suppress(OverlayError):  # a newer commit of main
            own = patchset.patched_on(checkout.version, checkout.read)
            return [Finding(one.name, "applies") for one in own]
    ported = series.port(patched, checkout.read)
    return [Finding(one.name, state, where=conflicts) for one, state, conflicts in ported]


def _files(
    patchset: PatchSet, old: dict[str, bytes], checkout: Checkout, versions: tuple[Version, Version]
) -> list[Finding]:
    """Return the overlay files that replace upstream's in either version."""
    rows = []
    for path in sorted(path for path in patchset.overlay if path.startswith("megatron/")):
        before, after = old.get(path), checkout.read(path)
        if before is None and after is None:
            continue
        state = "unchanged" if before == after else "changed upstream"
        state = "new upstream" if before is None else "gone upstream" if after is None else state
        was, now = (version.declared(module_name(path)) for version in versions)
        changed = [name for name in sorted({*was, *now}) if was.get(name) != now.get(name)]
        sides = [(name, was.get(name, "absent"), now.get(name, "absent")) for name in changed]
        lines = [f"{name}: was {before}, now {after}" for name, before, after in sides]
        rows.append(Finding(path, state, "\n".join(lines)))
    return rows


def _patched_functions(patched: list[Patched]) -> set[str]:
    """Return the full names of the pin's functions that patches change."""
    sides = series.originals(patched), series.last_tree(patched)
    before, after = ({p: functions(data, p) for p, data in one.items()} for one in sides)
    return {name for path in before for name, _ in before[path].items() - after[path].items()}
