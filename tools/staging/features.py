# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The features of features.toml: their graph, and the files that each has."""

import re
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from overlay.errors import FAILED, USAGE, OverlayError
from overlay.patchset import PatchSet

DATA = "tools/staging/features.toml"
TESTS = "tests/unit_tests"
TEST_ROOTS = (TESTS, "tools/staging/fix_tests")
"""Folders of ours whose files are staged below upstream's `TESTS`."""

_WORLD_SIZE = re.compile(r"(?:requires_world_size\(|^WORLD = )(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Feature:
    """One upstream PR; the fields are those of features.toml."""

    name: str
    title: str
    what: str
    why: str
    design: str
    needs: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    patches: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    upstream: list[str] = field(default_factory=list)
    fails: str = ""
    ranks: list[int] = field(default_factory=list)


class Features:
    """All features, and the files of the repository that each has.

    Raises:
        OverlayError: features.toml is malformed, or a feature needs an unknown one or, in a cycle,
            itself.
    """

    def __init__(self, patchset: PatchSet):
        try:
            table = tomllib.loads((patchset.root / DATA).read_text())
            self.landing: dict[str, str] = table.get("landing", {})
            self.header: str = table.get("header", "")
            self.stays: dict[str, str] = table.get("stays", {})
            self.by_name = {n: Feature(name=n, **values) for n, values in table["feature"].items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OverlayError(FAILED, f"{DATA}: no usable features: {error!r}") from None
        for feature in self.by_name.values():
            for name in feature.needs:
                self.get(name, f"{DATA}: {feature.name} needs")
        self.patchset = patchset
        self.tests = _test_files(patchset.root)
        try:
            graph = {name: feature.needs for name, feature in self.by_name.items()}
            self.order = list(TopologicalSorter(graph).static_order())
        except CycleError as error:
            circle = " → ".join(error.args[1])
            raise OverlayError(FAILED, f"{DATA}: features need each other: {circle}") from None

    def get(self, name: str, asked_by: str = "--feature") -> Feature:
        if name not in self.by_name:
            known = ", ".join(self.by_name)
            raise OverlayError(USAGE, f"{asked_by} {name}: no such feature; there are {known}")
        return self.by_name[name]

    def stack(self, name: str) -> list[Feature]:
        """Return a feature and all that it needs, each after those it needs."""
        wanted, ahead = set(), [name]
        while ahead:
            if (one := ahead.pop()) not in wanted:
                wanted.add(one)
                ahead += self.by_name[one].needs
        return [self.by_name[one] for one in self.order if one in wanted]

    def all(self) -> list[Feature]:
        """Return all features, each after those it needs."""
        return [self.by_name[name] for name in self.order]

    def files_of(self, feature: Feature) -> dict[str, Path]:
        """Return a feature's overlay files, by their path in a checkout."""
        found = {path: source.path for path, source in self.patchset.overlay.items()}
        return {path: found[path] for path in _fit(found, feature.files)}

    def tests_of(self, feature: Feature) -> dict[str, Path]:
        """Return a feature's tests and their helpers, by their path in upstream's tree."""
        return {
            f"{TESTS}/{self.landing.get(path, path)}": self.tests[path]
            for path in _fit(self.tests, feature.tests)
        }

    def ranks_of(self, feature: Feature) -> list[int]:
        """Return the numbers of ranks of a feature's tests: 1, its own, and those in marks."""
        sizes = {1, *feature.ranks}
        for path in self.tests_of(feature).values():
            if path.name.startswith("test_"):
                sizes |= {int(size) for size in _WORLD_SIZE.findall(path.read_text())}
        return sorted(sizes)

    def patches_of(self, feature: Feature) -> list[str]:
        """Return the full names of a feature's patches."""
        return [name for name in self.patchset.series() if name[:4] in feature.patches]

    def problems(self) -> list[str]:
        """Return files, patches and tests without exactly one owner, and patterns without match."""
        kinds = {
            "file": (sorted(self.patchset.overlay), "files"),
            "patch": ([name[:4] for name in self.patchset.series()], "patches"),
            "test": (sorted(self.tests), "tests"),
        }
        lines = []
        for kind, (paths, attribute) in kinds.items():
            patterns = [(f.name, p) for f in self.by_name.values() for p in getattr(f, attribute)]
            if kind == "test":
                patterns += [("what stays", pattern) for pattern in self.stays]
            for owner, pattern in patterns:
                if not any(fnmatchcase(path, pattern) for path in paths):
                    lines.append(f"{owner}: no {kind} fits {pattern}")
            for path in paths:
                owners = {owner for owner, pattern in patterns if fnmatchcase(path, pattern)}
                if len(owners) != 1:
                    lines.append(
                        f"{kind} {path}: of {' and '.join(sorted(owners)) or 'no feature'}"
                    )
        return lines


def _fit(paths: dict[str, Path], patterns: list[str]) -> list[str]:
    return [path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns)]


def _test_files(root: Path) -> dict[str, Path]:
    return {
        path.relative_to(root / folder).as_posix(): path
        for folder in TEST_ROOTS
        for path in sorted((root / folder).rglob("*.py"))
    }
