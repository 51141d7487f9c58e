# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The features of upstream PRs: each file belongs to exactly one, imports follow the graph, and the
tests of fixes fail on upstream's tree and pass on ours."""

import ast
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from mini import REPOSITORY, run
from overlay.checkout import Checkout
from overlay.git import write_files
from overlay.patchset import PatchSet
from overlay.source import module_name
from staging.features import TESTS, Feature, Features
from staging.stage import apply_patches, patches_on
from test_import_circles import imports

FEATURES = Features(PatchSet(REPOSITORY))
DOCUMENT = REPOSITORY / "docs/contributor/upstream-prs.md"
FIXES = REPOSITORY / "tools/staging/fix_tests"
FAILS = sorted(feature.fails for feature in FEATURES.all() if feature.fails)


def own_files(feature: Feature) -> dict[str, Path]:
    """A feature's Python files, by the path at which the others import them."""
    tests = set(FEATURES.tests_of(feature).values())
    paths = {f"{TESTS}/{name}": path for name, path in FEATURES.tests.items() if path in tests}
    files = FEATURES.files_of(feature) | paths
    return {path: source for path, source in files.items() if path.endswith(".py")}


OWNER = {module_name(path): f.name for f in FEATURES.all() for path in own_files(f)}
"""The feature of each of our modules."""


def foreign(feature: Feature, used: set[str]) -> list[str]:
    """The modules among ``used`` that are of features which this one does not need."""
    below = {one.name for one in FEATURES.stack(feature.name)}
    return [f"{feature.name}: {name} of {OWNER[name]}" for name in used if OWNER[name] not in below]


def test_every_file_patch_and_test_is_of_one_feature():
    assert FEATURES.problems() == []
    assert [f.name for f in FEATURES.all() if f.patches and not f.upstream] == []


def test_imports_between_features_follow_the_graph():
    """Imports in functions and tests count too: a feature works with nothing but what it needs."""
    for feature in FEATURES.all():
        for path, source in own_files(feature).items():
            assert foreign(feature, imports(source, module_name(path), set(OWNER))) == []


def test_no_test_asks_for_a_fixture_that_is_not_staged():
    stays = {path for path in FEATURES.tests if any(fnmatchcase(path, p) for p in FEATURES.stays)}
    functions = {
        path: [n for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.FunctionDef)]
        for path, source in FEATURES.tests.items()
    }
    lost = {
        function.name
        for path in stays
        if path.endswith("conftest.py")
        for function in functions[path]
        if any("fixture" in ast.unparse(decorator) for decorator in function.decorator_list)
    }
    assert lost
    for path in FEATURES.tests.keys() - stays:
        for function in functions[path]:
            asked = {argument.arg for argument in function.args.args}
            assert not lost & asked, f"{path}: {function.name}"


def test_imports_of_patches_follow_the_graph(upstreams, tmp_path):
    of = {name: f for f in FEATURES.all() for name in FEATURES.patches_of(f)}
    file = tmp_path / "file.py"
    for step in patches_on(FEATURES, Checkout(upstreams)).values():
        for path, sides in step.files.items():
            found = []
            for data in sides:
                file.write_bytes(data)
                found.append(imports(file, module_name(path), set(OWNER)))
            assert foreign(of[step.name], found[1] - found[0]) == []


@pytest.mark.parametrize("name", [name for name in FEATURES.order if name != "pretrain-mimo"])
def test_a_feature_applies_upon_what_it_needs(name, upstreams, tmp_path):
    """It applies upon nothing else. The patch of pretrain_mimo.py needs a git checkout."""
    steps = patches_on(FEATURES, Checkout(upstreams))
    shutil.copytree(upstreams / "megatron", tmp_path / "megatron")
    for feature in FEATURES.stack(name):
        patched = apply_patches(FEATURES, feature, steps, tmp_path)
        assert len(patched) >= bool(feature.patches)
        write_files(tmp_path, patched)


def test_a_description_says_how_to_run_the_tests_and_what_it_needs():
    text = FEATURES.pr_text(FEATURES.get("cp-bridge"))
    assert "torchrun --nproc-per-node 2 -m pytest" in text
    assert "-p tests.unit_tests.rank_agreement" in text
    assert "Process groups from a HyperCommGrid (`grids-and-groups`)" in text
    alone = FEATURES.pr_text(FEATURES.get("expert-bias"))
    assert "rank_agreement" not in alone and "torchrun" not in alone
    assert "Without this change, `tests/unit_tests/transformer/test_expert_bias.py` fails" in alone


def test_the_program_prints_the_graph_that_the_document_shows():
    program = REPOSITORY / "tools/stage_upstream_pr.sh"
    done = subprocess.run([program, "--graph"], capture_output=True, text=True)
    assert done.stdout == FEATURES.graph() + "\n"
    assert done.stdout in DOCUMENT.read_text(), f"put the output of --graph into {DOCUMENT}"


# Upstream's training loop needs Python 3.12 for this one name only.
PROGRAM = """
import sys, typing, typing_extensions, pytest
typing.override = typing_extensions.override
sys.exit(pytest.main(sys.argv[1:]))
"""


def failing(checkout: Path, files: list[str]) -> list[str]:
    """Return those of the fixes' test files in which a test fails on a checkout."""
    options = ["-q", "-rfE", "--tb=no", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore"]
    options += ["-c", os.devnull, "--rootdir", str(FIXES), *(str(FIXES / path) for path in files)]
    command = [sys.executable, "-c", PROGRAM, *options]
    env = {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=FIXES, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return sorted(set(re.findall(r"^FAILED (?:.*fix_tests/)?(\S+?)::", done.stdout, re.MULTILINE)))


@pytest.mark.parametrize("files", [FAILS[1:3], FAILS[:1] + FAILS[3:]], ids=["two", "others"])
def test_fixes_are_needed_and_work(upstreams, tmp_path, files):
    """A fix needs nothing else, and has a test that fails without it."""
    staged = {path for feature in FEATURES.all() for path in FEATURES.tests_of(feature)}
    assert {f"{TESTS}/{path}" for path in files} <= staged
    assert len([f for f in FEATURES.all() if f.fails and not f.needs]) >= 10
    assert failing(upstreams, files) == files
    checkout = shutil.copytree(upstreams, tmp_path / "checkout")
    assert run("apply", checkout).code == 0
    assert failing(checkout, files) == []
