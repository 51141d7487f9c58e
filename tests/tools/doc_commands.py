# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The shell commands of the documents, word by word."""

import contextlib
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mini import REPOSITORY

DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

LANGUAGES = {"bash", "diff", "json", "mermaid", "python", "text", "toml", "yaml"}
"""Languages that a fenced block may have; commands are in ``bash``."""

NOT_TESTED = "not tested: "
"""Beginning of the title of a block whose commands no test can run or parse."""

FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HERE_DOCUMENT = re.compile(r"<<'(\w+)'\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
SEPARATORS = ("&&", ";")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    language: str
    title: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command: the variables set before it, its words, and what it reads from a here-document."""

    variables: dict[str, str]
    words: list[str]
    stdin: str = ""


def blocks(document: Path) -> list[Block]:
    """All fenced blocks."""
    return [Block(*parts) for parts in FENCE.findall(document.read_text())]


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block, in order."""
    inputs: list[str] = []

    def taken(match: re.Match) -> str:
        inputs.append(match[2])
        return f"<< {len(inputs) - 1}"

    for words in _lines(HERE_DOCUMENT.sub(taken, block.text).replace("\\\n", " ")):
        for is_separator, command in itertools.groupby(words, SEPARATORS.__contains__):
            if not is_separator:
                yield _command(list(command), inputs)


def _lines(text: str) -> Iterator[list[str]]:
    """The words of each line; a line ends where no quotation is open."""
    line = ""
    for part in text.splitlines(keepends=True):
        line += part
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&<")
        lexer.whitespace_split = True
        with contextlib.suppress(ValueError):
            yield list(lexer)
            line = ""


def _command(words: list[str], inputs: list[str]) -> Command:
    stdin = ""
    if "<<" in words:
        at = words.index("<<")
        stdin, words = inputs[int(words[at + 1])], words[:at]
    count = next((i for i, w in enumerate(words) if not re.match(r"[A-Z_]+=", w)), len(words))
    return Command(dict(w.split("=", 1) for w in words[:count]), words[count:], stdin)
