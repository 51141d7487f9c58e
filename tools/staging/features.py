# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The features of features.toml: their graph, the files that each has, and its texts."""

import re
import textwrap
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
_PLUGIN = f"{TESTS}/rank_agreement.py"
_WORLD_SIZE = re.compile(r"(?:requires_world_size\(|^WORLD = )(\d+)", re.MULTILINE)
_TABLE = ["| feature | patches | fails without it, for upstream's bug |", "|---|---|---|"]


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

    def message(self) -> str:
        """Return the message of the feature's commit."""
        texts = (textwrap.fill(text, 72) for text in (self.what, self.why, self.design))
        return "\n\n".join([self.title, *texts])


class Features:
    """All features, and the files of the repository that each has.

    Raises:
        OverlayError: features.toml is malformed, or a feature needs an unknown one or, in a cycle,
            itself.
    """

    def __init__(self, patchset: PatchSet):
        self.patchset = patchset
        try:
            table = tomllib.loads((patchset.root / DATA).read_text())
            self.landing: dict[str, str] = table.get("landing", {})
            self.header: str = table.get("header", "")
            self.stays: dict[str, str] = table.get("stays", {})
            self.by_name = {n: Feature(name=n, **values) for n, values in table["feature"].items()}
            graph = {name: feature.needs for name, feature in self.by_name.items()}
            self.order = list(TopologicalSorter(graph).static_order())
        except CycleError as error:
            circle = " → ".join(error.args[1])
            raise OverlayError(FAILED, f"{DATA}: features need each other: {circle}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OverlayError(FAILED, f"{DATA}: no usable features: {error!r}") from None
        for feature in self.by_name.values():
            for name in feature.needs:
                self.get(name, f"{DATA}: {feature.name} needs")
        self.tests = {
            path.relative_to(patchset.root / folder).as_posix(): path
            for folder in TEST_ROOTS
            for path in sorted((patchset.root / folder).rglob("*.py"))
        }

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
        overlay = self.patchset.overlay.items()
        return {path: source for path, source in overlay if _fits(path, feature.files)}

    def tests_of(self, feature: Feature) -> dict[str, Path]:
        """Return a feature's tests and their helpers, by their path in upstream's tree."""
        return {
            f"{TESTS}/{self.landing.get(path, path)}": source
            for path, source in self.tests.items()
            if _fits(path, feature.tests)
        }

    def ranks_of(self, feature: Feature) -> list[int]:
        """Return the numbers of ranks of a feature's tests: 1, its own, and those in marks."""
        tests = [path for path in self.tests_of(feature).values() if path.name.startswith("test_")]
        marks = {int(n) for path in tests for n in _WORLD_SIZE.findall(path.read_text())}
        return sorted({1, *feature.ranks, *marks})

    def patches_of(self, feature: Feature) -> list[str]:
        """Return the full names of a feature's patches."""
        return [name for name in self.patchset.series() if name[:4] in feature.patches]

    def problems(self) -> list[str]:
        """Return files, patches and tests without exactly one owner, and patterns without match."""
        patches, lines = [name[:4] for name in self.patchset.series()], []
        for kind, paths in (
            ("files", sorted(self.patchset.overlay)),
            ("patches", patches),
            ("tests", sorted(self.tests)),
        ):
            patterns = [(f.name, p) for f in self.by_name.values() for p in getattr(f, kind)]
            patterns += [("what stays", one) for one in (self.stays if kind == "tests" else ())]
            for owner, pattern in patterns:
                if not any(fnmatchcase(path, pattern) for path in paths):
                    lines.append(f"{owner}: none of our {kind} fits {pattern}")
            for path in paths:
                owners = {owner for owner, pattern in patterns if fnmatchcase(path, pattern)}
                if len(owners) != 1:
                    names = " and ".join(sorted(owners)) or "no feature"
                    lines.append(f"{kind}: {path} is of {names}")
        return lines

    def commands(self, feature: Feature) -> dict[int, str]:
        """Return the shell lines that run a feature's tests, by number of ranks.

        Upstream's conftest is left out because it downloads data.
        """
        below = {path for one in self.stack(feature.name) for path in self.tests_of(one)}
        plugin = f" -p {_PLUGIN[:-3].replace('/', '.')}" if _PLUGIN in below else ""
        return {
            ranks: ("python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}")
            + f' -m pytest --noconftest{plugin} "${{tests[@]}}"'
            for ranks in self.ranks_of(feature)
        }

    def setting(self, feature: Feature) -> list[str]:
        """Return the shell lines before the commands: the environment, and `tests`."""
        tests = [path for path in sorted(self.tests_of(feature)) if Path(path).match("test_*")]
        return [
            "export PYTHONPATH=. OMP_NUM_THREADS=1",
            "export TRITON_INTERPRET=1  # without a GPU",
            f"tests=({' '.join(tests)})",
        ]

    def pr_text(self, feature: Feature) -> str:
        """Return the description of a feature's PR, in Markdown."""
        sections = {"What": feature.what, "Why": feature.why, "Design": feature.design}
        lines = [f"# {feature.title}", ""]
        for title, text in sections.items():
            lines += [f"## {title}", "", text, ""]
        lines += ["## Tests", "", *(f"- `{path}`" for path in sorted(self.tests_of(feature)))]
        if feature.fails:
            lines += ["", f"Without this change, `{TESTS}/{feature.fails}` fails."]
        run = [*self.setting(feature), *self.commands(feature).values()]
        lines += ["", "How to run them, on GPUs or without:", "", "```", *run, "```", ""]
        if feature.upstream:
            lines += ["Existing tests of the files that change:", ""]
            lines += [*(f"- `{path}`" for path in feature.upstream), ""]
        needs = [f"- {self.get(name).title} (`{name}`)" for name in feature.needs]
        return "\n".join([*lines, "## Depends on", "", *(needs or ["nothing"])]) + "\n"

    def graph(self) -> str:
        """Return the graph of features for the docs: a drawing, and a table of patches."""
        edges = [(feature.name, need) for feature in self.all() for need in feature.needs]
        drawn = {name for edge in edges for name in edge}
        lines = ["```mermaid", "graph BT", *(f"    {one} --> {need}" for one, need in edges)]
        lines += [f"    {name}" for name in self.order if name not in drawn]
        lines += ["```", "", *_TABLE]
        for feature in self.all():
            cells = f"`{feature.name}`: {feature.title}", ", ".join(feature.patches)
            fails = f"`{feature.fails}`" if feature.fails else ""
            lines.append(f"| {cells[0]} | {cells[1]} | {fails} |")
        return "\n".join(lines)


def _fits(path: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)
