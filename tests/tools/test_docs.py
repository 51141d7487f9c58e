# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The documents' links, the names after them, programs and features exist."""

import re
from pathlib import Path

import pytest
from doc_commands import DOCUMENTS

from mini import REPOSITORY
from overlay.patchset import PatchSet
from staging.features import Features

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)(?:[ \n] *`(\w+)`)?")
"""A link's target, and the name in that file that may follow the link."""

PROGRAM = re.compile(r"`((?:tools|docs)/[\w./-]*\w)[^`]*`")
"""A path of the repository at the beginning of a piece of code."""

REVIEWER = REPOSITORY / "docs/reviewer"
CAPABILITIES = sorted(
    path for path in REVIEWER.glob("*.md") if path.stem not in ("index", "architecture")
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_what_they_say(document: Path):
    lost = []
    for target, name in LINK.findall(document.read_text()):
        path = document.parent / target
        if "://" in target:
            continue
        if not path.exists() or name and not re.search(rf"\b{name}\b", path.read_text()):
            lost.append(f"{target} {name}".strip())
    assert lost == []


def test_paths_in_the_text_are_there():
    named = {(d.name, path) for d in DOCUMENTS for path in PROGRAM.findall(d.read_text())}
    assert len(named) > 10
    assert {name for name in named if not (REPOSITORY / name[1]).exists()} == set()


@pytest.mark.parametrize("document", CAPABILITIES, ids=lambda path: path.stem)
def test_a_capability_has_its_sections_and_names_tests(document: Path):
    text = document.read_text()
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    wanted = ["Problem", "Mathematics", "Groups", "Tests"]
    assert sorted(set(wanted) & set(sections)) == sorted(wanted)
    assert sections[-1] == "Tests" and "(../../tests/" in text.partition("## Tests")[2]


def test_every_feature_has_a_reviewers_page():
    told = "".join(path.read_text() for path in REVIEWER.glob("*.md"))
    features = Features(PatchSet(REPOSITORY)).by_name
    assert [name for name in features if f"`{name}`" not in told] == []
