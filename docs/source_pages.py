# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hook of mkdocs: the site has a page for each of the repository's files that a document links to.

Such a link is a relative path out of docs/, which also works where the repository is read. A linked
folder becomes a page that lists its files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
PAGES = "source"
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".toml": "toml", ".patch": "diff"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of docs/ that a document links to."""
    root = Path(config.docs_dir).parent
    linked = {
        path
        for file in files.documentation_pages()
        for target in LINK.findall(file.content_string)
        if (path := _outside(target, file.src_uri))
    }
    for path in sorted(linked):
        content = _page(root / path, path)
        files.append(File.generated(config, f"{PAGES}/{path}.md", content=content))
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Point the links at these pages."""
    here = page.file.src_uri

    def replaced(match: re.Match) -> str:
        path = _outside(match[0], here)
        return os.path.relpath(f"{PAGES}/{path}.md", Path(here).parent) if path else match[0]

    return markdown if here.startswith(f"{PAGES}/") else LINK.sub(replaced, markdown)


def _outside(target: str, page: str) -> str | None:
    """Return a link's target as a path from the repository's root; None if it is below docs/."""
    path = os.path.normpath(Path("docs", page).parent / target)
    return None if path.startswith("docs/") else path


def _page(file: Path, path: str) -> str:
    head = f"---\ntitle: {file.name}\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# `{path}`\n\n"
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if each.name != "__pycache__")
        return head + "\n".join(f"- `{name}`" for name in names)
    text = file.read_text()
    fence = "`" * 5
    return f"{head}{fence}{LANGUAGES.get(file.suffix, 'text')}\n{text}\n{fence}\n"
