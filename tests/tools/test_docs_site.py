# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The site of the documents: it builds without a warning, and its links lead somewhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from mini import REPOSITORY

pytest.importorskip("mkdocs", reason="needs the extra docs")


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links |= {given[name] for name in ("href", "src") if given.get(name)}
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the site anew; a warning is an error."""
    path = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", path]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # about mkdocs-material's own future
    done = subprocess.run(command, cwd=REPOSITORY, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


def test_no_link_is_dead(site):
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(link)
            if re.match(r"https?:|data:|mailto:", link):
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            if not file.exists() or file in pages and unquote(anchor) not in pages[file].anchors:
                dead.append(f"{path.relative_to(site)}: {link}")
    assert len(pages) > 50
    assert dead == []


def test_a_linked_file_of_the_repository_is_a_page(site):
    page = (site / "source/tests/slurm/rows_on_nodes.py.html").read_text()
    assert "KILL_AFTER_S" in page
