# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What the documents link to is there, and has the names that they give."""

import re
from pathlib import Path

import pytest

from mini import REPOSITORY

DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)(?:\s+`(\w+)`)?")
"""A target, and the name in it that may follow the link."""


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
