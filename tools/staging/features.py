# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The features of features.toml: what each needs, its files, patches and tests, and its text."""

import re
import textwrap
import tomllib
from dataclasses import dataclass, field
from email import message_from_string
from fnmatch import fnmatchcase
from graphlib import TopologicalSorter
from pathlib import Path

from overlay.errors import USAGE, OverlayError
from overlay.patchset import PatchSet
from overlay.series import split

DATA = "tools/staging/features.toml"
PAGE = "docs/contributor/upstream-features.md"
"""A section for each feature: its title, and the text of its PR."""
TESTS = "tests/unit_tests"
FIX_TESTS = "tools/staging/fix_tests"
"""Tests of ours that fail without their feature; they are staged below upstream's `TESTS`, too."""

CORE = "megatron/core/"
_PLUGIN = f"{TESTS}/rank_agreement.py"
_SECTION = re.compile(r"^### (.+) \(`([\w-]+)`\)\n\n((?:(?!#).*\n)+)", re.MULTILINE)
_WORLD_SIZE = re.compile(r"(?:requires_world_size\(|^WORLD = )(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Feature:
    """One upstream PR; the fields are those of features.toml, and those of its section."""

    name: str
    title: str
    text: str
    needs: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)


class Features:
    """All features, in an order in which each follows those that it needs.

    Of several patterns that a path fits, the longest one decides whose it is. Patches are those of
    a version of the lock, by default the releases'. A feature of which that version has a patch's
    header only is left out: upstream has it.
    """

    def __init__(self, patchset: PatchSet, version: str = ""):
        self.patchset = patchset
        table = tomllib.loads((patchset.root / DATA).read_text())
        self.landing: dict[str, str] = table.get("landing", {})
        self.header: str = table.get("header", "")
        self.stays: dict[str, str] = table.get("stays", {})
        patches = {name: split(patch) for name, patch in patchset.series(version).items()}
        headers = {
            name: message_from_string(text.decode().strip()) for name, (text, _) in patches.items()
        }
        landed = {headers[name]["Feature"] for name, (_, diff) in patches.items() if not diff}
        self.headers = {n: one for n, one in headers.items() if one["Feature"] not in landed}
        page = (patchset.root / PAGE).read_text()
        texts = {name: (title, text) for title, name, text in _SECTION.findall(page)}
        there = {name: fields for name, fields in table["feature"].items() if name not in landed}
        found = {
            name: Feature(name, *texts.get(name, (name, "")), **fields)
            for name, fields in there.items()
        }
        for one in found.values():
            one.needs[:] = [name for name in one.needs if name not in landed]
        order = TopologicalSorter({name: one.needs for name, one in found.items()})
        self.by_name = {name: found[name] for name in order.static_order()}
        self.tests = {
            path.relative_to(patchset.root / folder).as_posix(): path
            for folder in (TESTS, FIX_TESTS)
            for path in sorted((patchset.root / folder).rglob("*.py"))
        }

    def owner(self, path: str, kind: str) -> str:
        """Return the feature that has a path among its `files` or `tests`; "" if none has."""
        patterns = [(p, one.name) for one in self.by_name.values() for p in getattr(one, kind)]
        patterns += [(pattern, "") for pattern in self.stays]
        fit = [each for each in patterns if fnmatchcase(path.removeprefix(CORE), each[0])]
        return max(fit, key=lambda each: len(each[0]), default=("", ""))[1]

    def named(self, names: list[str]) -> list[Feature]:
        """Return the features of these names; refuse an unknown one."""
        if unknown := [name for name in names if name not in self.by_name]:
            known = ", ".join(self.by_name)
            raise OverlayError(USAGE, f"{unknown[0]}: no such feature; there are {known}")
        return [self.by_name[name] for name in names]

    def stack(self, *names: str) -> list[Feature]:
        """Return features, by default all, and what they need, each after those that it needs."""
        wanted, ahead = set(), self.named([*names] or [*self.by_name])
        while ahead:
            if (one := ahead.pop()).name not in wanted:
                wanted.add(one.name)
                ahead += self.named(one.needs)
        return [one for one in self.by_name.values() if one.name in wanted]

    def patches_of(self, feature: Feature) -> list[tuple[str, str]]:
        """Return the names of a feature's patches, and their descriptions."""
        return [
            (name, " ".join(header["Description"].split()))
            for name, header in self.headers.items()
            if header["Feature"] == feature.name
        ]

    def files_of(self, feature: Feature) -> dict[str, Path]:
        """Return a feature's overlay files, by their path in a checkout."""
        overlay = self.patchset.overlay.items()
        return {path: file for path, file in overlay if self.owner(path, "files") == feature.name}

    def tests_of(self, feature: Feature) -> dict[str, Path]:
        """Return a feature's tests and their helpers, by their path in upstream's tree."""
        return {
            f"{TESTS}/{self.landing.get(path, path)}": source
            for path, source in self.tests.items()
            if self.owner(path, "tests") == feature.name
        }

    def commands(self, feature: Feature) -> dict[int, str]:
        """Return the shell lines that run a feature's tests, if it has any, by number of ranks.

        Upstream's conftest is left out because it downloads data.
        """
        tests = self.tests_of(feature)
        files = [path for path in sorted(tests) if Path(path).match("test_*")]
        text = "".join(tests[path].read_text() for path in files)
        below = {path for one in self.stack(feature.name) for path in self.tests_of(one)}
        plugin = f" -p {_PLUGIN[:-3].replace('/', '.')}" if _PLUGIN in below else ""
        return {
            ranks: "export PYTHONPATH=. OMP_NUM_THREADS=1\n"
            "export TRITON_INTERPRET=1  # without a GPU\n"
            + ("python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}")
            + f" -m pytest --noconftest{plugin} \\\n    "
            + " \\\n    ".join(files)
            for ranks in sorted({1, *feature.ranks, *map(int, _WORLD_SIZE.findall(text))})
            if files
        }

    def message(self, feature: Feature) -> str:
        """Return the message of a feature's commit, which is its PR's description."""
        texts = [*feature.text.split("\n\n"), *(text for _, text in self.patches_of(feature))]
        parts = [feature.title, *(textwrap.fill(" ".join(text.split()), 72) for text in texts)]
        if fails := [p for p, path in self.tests_of(feature).items() if FIX_TESTS in str(path)]:
            parts.append("Without this change, these fail:\n" + "\n".join(fails))
        if commands := self.commands(feature):
            *others, last = commands.items()
            parts += ["How to run the tests:", textwrap.indent(last[1], "    ")]
            if others:
                more = "".join(f", on {count}" for count, _ in others[1:])
                parts.append(f"Also on one rank, with python in place of torchrun{more}.")
        if feature.needs:
            parts.append("Depends on: " + ", ".join(feature.needs))
        return "\n\n".join(parts)
