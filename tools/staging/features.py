# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The features of features.toml: what each needs, its patches, files and tests, and its message."""

import re
import textwrap
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from email import message_from_string
from fnmatch import fnmatchcase

from overlay.patchset import PatchSet
from overlay.series import split

TESTS = "tests/unit_tests/"


@dataclass(frozen=True)
class Feature:
    """One upstream PR, with the fields of features.toml."""

    text: str
    needs: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=lambda: [1])


class Features:
    """All features, with the patches of a version of the lock, or of the releases."""

    def __init__(self, patchset: PatchSet, version: str = ""):
        table = tomllib.loads((patchset.root / "tools/staging/features.toml").read_text())
        moved = table.pop("landing").items()
        self._landing = {TESTS + ours: TESTS + theirs for ours, theirs in moved}
        self.patterns = {TESTS + pattern: "" for pattern in table.pop("stays")}
        self.by_name = {name: Feature(**fields) for name, fields in table.items()}
        for name, one in self.by_name.items():
            self.patterns |= {TESTS + pattern: name for pattern in one.tests}
            for pattern in one.files:
                start = "" if pattern.startswith("examples/") else "megatron/core/"
                self.patterns[start + pattern] = name
        tests = sorted((patchset.root / TESTS).rglob("*.py"))
        self.sources = patchset.overlay | {str(p.relative_to(patchset.root)): p for p in tests}
        self._patches: dict[str, dict[str, bytes]] = defaultdict(dict)
        for patch in patchset.series(version).values():
            header, diff = split(patch)
            fields = message_from_string(header.decode().strip())
            self._patches[fields["Feature"]][fields["Description"]] = diff

    def stack(self, *names: str) -> list[str]:
        """Return features and what they need, each after what it needs."""
        found = [[*self.stack(*self.by_name[name].needs), name] for name in names]
        return list(dict.fromkeys(name for below in found for name in below))

    def patch(self, name: str) -> bytes:
        """Return the changes of a feature's patches, one after the other."""
        return b"".join(self._patches[name].values())

    def pattern(self, path: str) -> str:
        """Return the longest pattern that a path fits: it decides whose the path is."""
        return max((p for p in self.patterns if fnmatchcase(path, p)), key=len, default="")

    def files_of(self, name: str) -> dict[str, bytes]:
        """Return a feature's new files by their path in upstream's tree; some tests move there."""
        found = {}
        for path, source in self.sources.items():
            if self.patterns[self.pattern(path)] == name:
                data = source.read_bytes()
                for names in self._landing.items():
                    ours, theirs = (each[:-3].replace("/", ".").encode() for each in names)
                    data = re.sub(rb"\b%s\b" % re.escape(ours), theirs, data)
                found[self._landing.get(path, path)] = data
        return found

    def commands(self, name: str) -> list[str]:
        """Return a command for each number of ranks on which a feature's tests run.

        It leaves out upstream's conftest, which downloads data.
        """
        tests = " ".join(path for path in self.files_of(name) if re.search(r"/test_\w+\.py$", path))
        plugin = "-p tests.unit_tests.rank_agreement " * ("test-ranks" in self.stack(name))
        launch = "torchrun --standalone --nproc-per-node {} -m pytest --noconftest {}{}"
        ranks = self.by_name[name].ranks * bool(tests)
        return [launch.format(number, plugin, tests) for number in ranks]

    def message(self, name: str) -> str:
        """Return the message of a feature's commit, which is its PR's description."""
        title, _, text = self.by_name[name].text.partition("\n")
        texts = [text, *self._patches[name]]
        parts = [title, *(textwrap.fill(" ".join(each.split()), 72) for each in texts)]
        if commands := self.commands(name):
            parts += ["Tests, with PYTHONPATH=. and, without a GPU, TRITON_INTERPRET=1:"]
            parts += ["\n".join(commands)]
        if needs := self.by_name[name].needs:
            parts.append("Depends on: " + ", ".join(needs))
        return "\n\n".join(filter(None, parts))
