# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Comparison of the patch set with another Megatron-LM tree, without changing anything."""

import json
from dataclasses import asdict, dataclass, field

from overlay import git, header, replacements, series
from overlay.checkout import STATE_DIR, Checkout, digest
from overlay.errors import DIFFERS_FROM_LOCK, OverlayError
from overlay.fetch import upstream
from overlay.names import Tree
from overlay.patchset import PatchSet
from overlay.uses import Uses, changed_names

_APPLIES, _OFFSET = "applies", "applies with offset"
_LEFT_OUT = "left out"
_NOTHING_TO_DO = {_APPLIES, _OFFSET, _LEFT_OUT, "unchanged"}
_PLACES = 4  # most places of use that the table shows


@dataclass
class Row:
    """A patch, an overlay file, or a name: its state, and where (files, or places of use)."""

    name: str
    state: str
    detail: str = ""
    where: list[str] = field(default_factory=list)


@dataclass
class Report:
    """The comparison.

    ``names`` has only rows that need work; ``new_files`` counts overlay files that replace none of
    upstream's.
    """

    pin: str
    version: str
    patches: list[Row]
    files: list[Row]
    new_files: int
    names: list[Row]

    def is_work(self) -> bool:
        return bool(self.names) or any(
            row.state not in _NOTHING_TO_DO for row in self.patches + self.files
        )

    def json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def text(self) -> str:
        lines = [f"Megatron-LM {self.version} against the pin {self.pin}"]
        lines += [f"\npatches ({len(self.patches)})", *_table(self.patches)]
        lines += [f"\noverlay files that replace upstream's; {self.new_files} others are new"]
        lines += _table(self.files)
        lines += [f"\nupstream's names that our code uses: {len(self.names)} changed"]
        return "\n".join(lines + _table(self.names))


def _table(rows: list[Row]) -> list[str]:
    width = max((len(row.state) for row in rows), default=0)
    lines = []
    for row in rows:
        lines.append(f"  {row.state:{width}}  {row.name}")
        more = f" and {len(row.where) - _PLACES} more" if len(row.where) > _PLACES else ""
        for text in (row.detail, ", ".join(row.where[:_PLACES]) + more):
            lines += [f"  {'':{width}}    {line}" for line in text.splitlines()]
    return lines


def drift(patchset: PatchSet, checkout: Checkout) -> Report:
    """Compare the pin with a pristine tree of another version.

    Raises:
        OverlayError: the tree has the overlay applied.
    """
    if (checkout.root / STATE_DIR).exists():
        raise OverlayError(
            DIFFERS_FROM_LOCK, f"{checkout.root} has the overlay applied: revert it first"
        )
    pin = patchset.lock.pin
    old = upstream(patchset.lock, pin, patchset.root)
    new = {
        path.relative_to(checkout.root).as_posix(): path.read_bytes()
        for path in checkout.root.glob("megatron/**/*")
        if path.is_file() and not path.is_symlink()
    }
    files, new_files = _files(patchset, old, new)
    return Report(
        pin, checkout.version, _patches(patchset, old, new) + _git_only(patchset, checkout),
        files, new_files,
        _names(patchset, old, new),
    )  # fmt: skip


def _patches(patchset: PatchSet, old: dict[str, bytes], new: dict[str, bytes]) -> list[Row]:
    """Return how each patch of the sdist's files applies after those before it."""
    git_only = patchset.lock.git_only_patches()
    patches = {name: p for name, p in patchset.series().items() if name not in git_only}
    steps = series.build(patches, old.get)
    ported, conflicts = series.port(steps, old.get, new.get)
    rows, before = [], {}
    for index, step in enumerate(ported):
        where = [path for path, steps_of in conflicts.items() if index in steps_of]
        if where:
            rows.append(Row(step.name, "conflicts", where=where))
        elif not step.paths:
            rows.append(Row(step.name, "already there"))
        else:
            files = {path: before.get(path, new.get(path)) for path in steps[index].paths}
            rows.append(Row(step.name, _how_it_applies(step.name, patches, files)))
        before = step.tree
    return rows


def _git_only(patchset: PatchSet, checkout: Checkout) -> list[Row]:
    """Return how the patches of git-only files apply; without the pin's files, none can merge."""
    git_only, patches = patchset.lock.git_only(), patchset.series()
    files = {path: checkout.read(path) for path in git_only if digest(checkout.look(path))}
    rows = []
    for name in sorted(patchset.lock.git_only_patches()):
        if files.keys() != git_only.keys():
            missing = sorted(git_only.keys() - files.keys())
            rows.append(Row(name, _LEFT_OUT, "not in this tree", missing))
            continue
        touched = [path for path, entry in git_only.items() if name in entry.by]
        try:
            diff = header.split(patches[name])[1]
            done, moved = git.apply(name, diff, {path: files[path] for path in touched})
            files |= done
            rows.append(Row(name, _OFFSET if moved else _APPLIES))
        except OverlayError:
            rows.append(Row(name, "conflicts", where=touched))
    return rows


def _how_it_applies(name: str, patches: dict[str, bytes], files: dict[str, bytes]) -> str:
    try:
        _, moved = git.apply(name, header.split(patches[name])[1], files)
    except OverlayError:
        return "merges"
    return _OFFSET if moved else _APPLIES


def _files(
    patchset: PatchSet, old: dict[str, bytes], new: dict[str, bytes]
) -> tuple[list[Row], int]:
    """Return the overlay files that replace upstream's, and the number of others."""
    rows, pin, other = [], Tree(old), Tree(new)
    replaced = sorted(path for path in patchset.overlay if path in old or path in new)
    for path in replaced:
        if old.get(path) == new.get(path):
            rows.append(Row(path, "unchanged"))
        elif path not in new:
            rows.append(Row(path, "gone upstream"))
        else:
            state = "changed upstream" if path in old else "new upstream"
            changes = changed_names(pin, other, path)
            detail = [f"{kind}: {name} {detail}".strip() for kind, name, detail in changes]
            rows.append(Row(path, state, "\n".join(detail)))
    return rows, len(patchset.overlay) - len(replaced)


def _names(patchset: PatchSet, old: dict[str, bytes], new: dict[str, bytes]) -> list[Row]:
    """Return upstream's names that our code uses and that are gone or declared differently."""
    sources = {path: source.path for path, source in patchset.overlay.items()}
    for path in (patchset.root / "tests").glob("**/*.py"):
        sources[path.relative_to(patchset.root).as_posix()] = path
    ours = {path: file.read_bytes() for path, file in sources.items() if path.endswith(".py")}
    uses = Uses(ours, Tree(old | ours), Tree(new | ours))
    uses.check_replaced(replacements.declared(patchset.root), replacements.DECLARED)
    rows = [Row(name, kind, detail, places) for (kind, name, detail), places in uses.found.items()]
    return sorted(rows, key=lambda row: (row.state, row.name))
