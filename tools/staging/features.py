# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The features of features.toml: what each needs, its patches and files, and its PR's text."""

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
    ranks: list[int] = field(default_factory=lambda: [1])


class Features:
    """All features, with the patches of a version of the lock, or of the releases."""

    def __init__(self, patchset: PatchSet, version: str = ""):
        table = tomllib.loads((patchset.root / "tools/staging/features.toml").read_text())
        self._landing, stays = table.pop("landing"), table.pop("stays")
        self.by_name = {name: Feature(**fields) for name, fields in table.items()}
        self.patterns = dict.fromkeys(stays, "")
        for name, one in self.by_name.items():
            self.patterns |= dict.fromkeys(one.files, name)
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

    def fit(self, path: str) -> list[str]:
        """Return the patterns that a path fits; the last one decides whose the path is."""
        short = path.removeprefix(TESTS).removeprefix("megatron/core/")
        return sorted((p for p in self.patterns if fnmatchcase(short, p)), key=len)

    def files_of(self, name: str) -> dict[str, bytes]:
        """Return a feature's new files by their path in upstream's tree; some tests move there."""
        found = {}
        for path, source in self.sources.items():
            if self.patterns[self.fit(path)[-1]] == name:
                data = source.read_bytes()
                for names in self._landing.items():
                    modules = ((TESTS + each)[:-3].replace("/", ".").encode() for each in names)
                    data = data.replace(*modules)
                short = path.removeprefix(TESTS)
                found[path.replace(short, self._landing.get(short, short))] = data
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
        needs = self.by_name[name].needs
        needs = ["Depends on: " + ", ".join(needs)] * bool(needs)
        texts = [text, *self._patches[name], *needs]
        filled = (textwrap.fill(" ".join(each.split()), 72) for each in texts)
        how = "Tests, with PYTHONPATH=. and, without a GPU, TRITON_INTERPRET=1:"
        return "\n\n".join([title, *filter(None, filled), "\n".join([how, *self.commands(name)])])
