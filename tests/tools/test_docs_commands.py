# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Every shell command of the documents runs, or is one that its program's parser takes.

A document is a shell session: `cd`, `export` and a command's files hold for the commands after it.
Training commands go through the program's own parsing, which resolves layouts for as many ranks as
the command starts; nothing is trained.
"""

import argparse
import contextlib
import itertools
import logging
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import PLANNED
from examples.mimo.nemotron_vlm.loop.dry_run import planned
from examples.mimo.nemotron_vlm.model.presets import find_preset, write_preset
from examples.mimo.nemotron_vlm.options.arguments import parse
from examples.mimo.nemotron_vlm.options.own_options import own_options
from mini import REPOSITORY, UPSTREAM, World, git
from overlay.cli import _parser as overlay_parser

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


MAKEFILE = (REPOSITORY / "Makefile").read_text()
EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
PROGRAM = "pretrain_nemotron_vlm.py"

RUN_BY = {
    ("energon", "prepare"): "tests/unit_tests/examples/nemotron_vlm/energon/test_energon_docs.py",
    ("python", "shards.py"): "tests/unit_tests/examples/nemotron_vlm/energon/test_energon_docs.py",
}
"""Commands that another test runs as the document has them."""

SCRIPTS = {
    "tools/stage_upstream_pr.sh": "tools/staging",
    "tools/upstream_tests.sh": "tools/upstream_tests",
}
"""Python programs behind shell scripts."""

PYTEST_OPTIONS = {"--once", "-k", "--collect-only"}

QUICK = {"--list", "hf-to-megatron"}
"""Arguments with which programs run, instead of only being parsed."""

MOST_NOT_TESTED = 3


class Parsed(Exception):
    """Raised once a program has read its arguments, to stop it there."""


class Session:
    """The shell of one document.

    Args:
        directory: for what commands write.
        world: a small upstream, with a patch set, in the place of Megatron-LM.
    """

    def __init__(self, directory: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.world, self.monkeypatch = directory, world, monkeypatch
        self.place = REPOSITORY
        self.rules: dict[str, Callable[[Command], None]] = {
            "make": self._make,
            "git": self._git,
            "torchrun": self._torchrun,
            "sbatch": self._sbatch,
            **dict.fromkeys(("python", "python3", "tools/python.sh"), self._python),
        }

    def run(self, command: Command) -> None:
        """Run or parse it; an `AssertionError` or an exit says what is wrong."""
        name, *words = command.words
        if elsewhere := RUN_BY.get((name, *words[:1])):
            assert " ".join(command.words[:2]) in (REPOSITORY / elsewhere).read_text()
        elif name == "cd":
            self.place = REPOSITORY / words[0]
            self._exists(".")
        elif name == "source":
            assert words == [".venv/bin/activate"]
        elif name == "pip":
            assert words[0] == "install" and set(re.findall(r"\w+", words[1])) <= EXTRAS.keys()
        elif name == "tools/slurm/e2e_batch.sh":
            options = {word for word in words if word[0] == "-"}
            assert words[0] == "OUT" and options <= PYTEST_OPTIONS
        elif name in ("tools/apply_overlay.sh", "tools/fetch_upstream.sh"):
            self._overlay([name[6:11], *words])
        elif name in self.rules:
            self.rules[name](command)
        elif name != "export":
            assert name.startswith("tools/"), f"no rule for {name}: add one, or title the block"
            self._script(SCRIPTS.get(name, name), words)

    def _exists(self, path: str) -> None:
        assert (self.place / path).exists(), path

    def _make(self, command: Command) -> None:
        for word in command.words[1:]:
            name, is_variable, _ = word.partition("=")
            assert f"$({name})" in MAKEFILE if is_variable else f"\n{name}:" in MAKEFILE, word

    def _git(self, command: Command) -> None:
        (self.directory / "build/new").mkdir(parents=True, exist_ok=True)
        (self.directory / "build/new/file").touch()
        git(self.directory, *command.words[1:])

    def _overlay(self, arguments: list[str]) -> None:
        """Run the overlay's tool in the small world, unless other versions or patches are named."""
        options = overlay_parser().parse_args(arguments)
        if options.command != "fetch" and not getattr(options, "into", None):
            checkout = getattr(options, "checkout", None)
            given = [self.world.checkout if Path(w) == checkout else w for w in arguments]
            result = self.world.run(*given)
            assert result.code == 0, result.errors

    def _python(self, command: Command) -> None:
        words = command.words[1:]
        if words[0] == "-":
            exec(compile(command.stdin, "here-document", "exec"), {})
        elif words[0] == "-c":
            compile(words[1], "-c", "exec")
        elif words[0] == "-m":
            self._module(words[1], words[2:])
        elif words[0] == "tools/overlay":
            self._overlay(words[1:])
        else:
            self._file(words[0], words[1:], ranks=1)

    def _torchrun(self, command: Command) -> None:
        options = get_args_parser().parse_args(command.words[1:])
        ranks = int(options.nnodes.split(":")[-1]) * int(options.nproc_per_node)
        if options.module:
            self._module(options.training_script, options.training_script_args)
        else:
            self._file(options.training_script, options.training_script_args, ranks)

    def _module(self, name: str, arguments: list[str]) -> None:
        if name == "pytest":
            for path in arguments:
                self._exists(path)
        else:
            assert (REPOSITORY / "megatron_overlay" / name.replace(".", "/")).exists(), name

    def _file(self, path: str, arguments: list[str], ranks: int) -> None:
        self._exists(path)
        if path.endswith(PROGRAM):
            self._train(arguments, ranks)
        else:
            self._script(path, arguments)

    def _train(self, arguments: list[str], ranks: int) -> None:
        model = self.directory / "model.json"
        write_preset(find_preset("tiny"), model)
        for name in ("WEIGHTS", "ALIGNED", "DATA", "TOKENIZER", "OUT"):  # of recipes
            self.monkeypatch.setenv(name, str(self.directory))
        arguments = [str(self.place / w) if "/recipes/" in w else w for w in arguments]
        absent = [w for w in arguments if w.endswith("/model.json") and not Path(w).exists()]
        arguments = [str(model) if w in absent else w for w in arguments]
        own = own_options(arguments)
        self.monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # as torchrun does
        try:
            if own.language == PLANNED:
                arguments = planned(arguments, own, ranks)
            parse(arguments, own.dry_run or ranks)
        except UserError as error:
            pytest.fail(str(error))

    def _sbatch(self, command: Command) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--nodes", type=int, required=True)
        parser.add_argument("--gpus-per-node", type=int, default=1)
        parser.add_argument("--time")
        parser.add_argument("job", nargs=argparse.REMAINDER)
        options = parser.parse_args(command.words[1:])
        script, _, *arguments = options.job
        if script == "tools/slurm/train.sbatch":
            each = command.variables.get("RANKS_PER_NODE", options.gpus_per_node)
            self._train(arguments, options.nodes * int(each))
        else:
            self.run(Command({}, options.job))

    def _script(self, path: str, arguments: list[str]) -> None:
        """Run a program of ours: whole if it is quick, else until it has read its arguments."""
        read = argparse.ArgumentParser.parse_args
        at_hand = not any(word.startswith("/data/") for word in arguments)  # not published weights
        is_whole = at_hand and not QUICK.isdisjoint(arguments)

        def parsed(parser, *given):
            options = read(parser, *given)
            if not is_whole:
                raise Parsed
            return options

        ends = SystemExit if is_whole else Parsed
        with (
            self.monkeypatch.context() as patched,
            warnings.catch_warnings(),
            pytest.raises(ends) as end,
        ):
            patched.setattr(logging, "disable", lambda level: None)  # it would outlast the program
            patched.setattr(argparse.ArgumentParser, "parse_args", parsed)
            patched.setattr(sys, "argv", [path, *arguments])
            patched.syspath_prepend(str((REPOSITORY / path).parent))
            runpy.run_path(str(REPOSITORY / path), run_name="__main__")
        assert not is_whole or not end.value.code


@pytest.fixture
def session(tmp_path, world, monkeypatch, large_world) -> Session:
    world.as_git(UPSTREAM)
    monkeypatch.chdir(tmp_path)
    return Session(tmp_path, world, monkeypatch)


def name_of(document: Path) -> str:
    return str(document.relative_to(REPOSITORY))


WITH_COMMANDS = [path for path in DOCUMENTS if any(b.language == "bash" for b in blocks(path))]


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=name_of)
def test_commands_run_or_parse(document, session):
    for block in blocks(document):
        if block.language == "bash" and not block.title.startswith(NOT_TESTED):
            for command in commands(block):
                session.run(command)


def test_every_block_is_read_and_few_are_not_tested_for_a_reason():
    reasons = []
    for document in DOCUMENTS:
        text, found = document.read_text(), blocks(document)
        fences = re.findall(r"^ *```.*$", text, re.MULTILINE)
        indented = text.count('    ```bash title="not tested')
        assert len(fences) == 2 * len(found) + indented, document
        assert {block.language for block in found} <= LANGUAGES, document
        reasons += [block.title.removeprefix(NOT_TESTED) for block in found if block.title]
    assert len(reasons) <= MOST_NOT_TESTED and all(reasons)


def test_make_refuses_data_that_it_does_not_know():
    line = ["make", "-C", str(REPOSITORY), "-n", "train", "DATA=letters"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 2 and "choose from digits, energon, omni" in done.stderr
