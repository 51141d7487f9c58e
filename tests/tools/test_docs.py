# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""All that the documents name exists: links, names after them, programs, options, messages."""

import argparse
import importlib
import os
import re
import subprocess
import sys

import pytest

from examples.mimo.nemotron_vlm.data.reading_options import add_options
from examples.mimo.nemotron_vlm.model.presets import tiny
from examples.mimo.nemotron_vlm.options.command_line import set_defaults
from examples.mimo.nemotron_vlm.options.defaults import defaults
from examples.mimo.nemotron_vlm.options.own_options import OwnOptions
from megatron.training.arguments import add_megatron_arguments
from mini import REPOSITORY
from overlay.patchset import PatchSet
from staging.features import Features

DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)(?:[ \n] *`(\w+)`)?")
"""A link's target, and the name in that file that may follow the link."""
PROGRAM = re.compile(r"`((?:tools|docs)/[\w./-]*\w)[^`]*`")
"""A path of the repository at the beginning of a piece of code."""

TRAINING = re.compile(r"^.*(?:pretrain_nemotron_vlm\.py|train\.sbatch) (.*)$", re.MULTILINE)
"""The words after a training program in a shell command."""

REVIEWER = REPOSITORY / "docs/reviewer"
TROUBLES = sorted(REPOSITORY.glob("docs/user/troubleshooting*.md"))
FROM_ELSEWHERE = {
    "received by PID",
    "Timed out waiting",
    "Connection closed by peer",
    "Watchdog caught collective operation timeout",
}
"""Messages of PyTorch."""


def test_links_lead_to_what_they_say():
    lost = []
    for document in DOCUMENTS:
        for target, name in LINK.findall(document.read_text()):
            path = document.parent / target
            if "://" not in target and not path.exists():
                lost.append(f"{document.name}: {target}")
            elif name and not re.search(rf"\b{name}\b", path.read_text()):
                lost.append(f"{document.name}: {target} {name}")
    assert lost == []


def test_the_site_has_no_dead_link_or_anchor(tmp_path):
    """A warning is an error, and linked files of the repository are pages."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # about mkdocs-material's own future
    done = subprocess.run(command, cwd=REPOSITORY, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "source/tests/tools/test_slurm_train.py.html").read_text()
    assert "SLURM_SUBMIT_DIR" in page


def test_paths_in_the_text_are_there():
    named = {(d.name, path) for d in DOCUMENTS for path in PROGRAM.findall(d.read_text())}
    assert len(named) > 10
    assert {name for name in named if not (REPOSITORY / name[1]).exists()} == set()


def test_the_program_has_the_options_of_the_commands():
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    add_options(parser, OwnOptions)
    set_defaults(parser, defaults(tiny(), "cuda", packs=False))
    used = set()
    for document in DOCUMENTS:
        for block in re.findall(r"^```bash\n(.*?)^```$", document.read_text(), re.M | re.DOTALL):
            for words in TRAINING.findall(block.replace("\\\n", " ")):
                used.update((document.name, word) for word in re.findall(r"(?<!\S)--[\w-]+", words))
    assert len(used) > 100
    assert [each for each in used if each[1] not in parser._option_string_actions] == []


def test_every_feature_has_a_reviewers_page():
    told = "".join(path.read_text() for path in REVIEWER.glob("*.md"))
    features = Features(PatchSet(REPOSITORY)).by_name
    assert [name for name in features if f"`{name}`" not in told] == []


def plain(text: str) -> str:
    """Strip a text of backticks and line breaks, and join literals that follow one another."""
    return " ".join(re.sub(r'"\s*f?"', "", text).replace("`", "").split())


def test_tables_are_of_the_measured_runs(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "tools/bench")
    tables = importlib.import_module("tables")
    for page, table in tables.tables().items():
        text = (REPOSITORY / page).read_text()
        assert tables.with_table(text, table) == text, "tools/bench/vlm.py tables writes it"


def test_the_messages_of_troubleshooting_are_in_the_code():
    """A message may have … for values."""
    told = "".join(page.read_text() for page in TROUBLES)
    listed = re.findall(r"^\| `([^`]+)` \|", told, re.MULTILINE)
    assert len(listed) > 50
    roots = (REPOSITORY / root for root in ("examples", "tools", "megatron_overlay"))
    files = [path for root in roots for path in root.rglob("*") if path.suffix in (".py", ".sh")]
    code = "\n".join(plain(path.read_text()) for path in [*files, REPOSITORY / "Makefile"])
    lost = {each for each in listed if any(piece not in code for piece in plain(each).split("…"))}
    assert lost == FROM_ELSEWHERE
