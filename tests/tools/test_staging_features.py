# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The features of upstream PRs: each file is of one, imports follow the graph, and the tests of
fixes fail on upstream's tree and pass on ours."""

import ast
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from mini import NEXT, REPOSITORY, git, make_repository, run
from overlay.patchset import PatchSet
from overlay.source import module_name
from staging.features import CORE, FIX_TESTS, PAGE, TESTS, Feature, Features
from staging.stage import Staging
from test_import_circles import imports

PATCHSET = PatchSet(REPOSITORY)
FEATURES = Features(PATCHSET)
STAGED = Features(PATCHSET, PATCHSET.lock.next) if NEXT else FEATURES
"""The features on the tree that is at hand."""
FIXES = REPOSITORY / FIX_TESTS
PATHS = {"files": FEATURES.patchset.overlay, "tests": FEATURES.tests}


def own_files(feature: Feature) -> dict[str, Path]:
    """A feature's Python files, by the path at which the others import them."""
    tests = {f"{TESTS}/{name}": path for name, path in FEATURES.tests.items()
             if FEATURES.owner(name, "tests") == feature.name}  # fmt: skip
    files = FEATURES.files_of(feature) | tests
    return {path: source for path, source in files.items() if path.endswith(".py")}


OWNER = {module_name(path): f.name for f in FEATURES.by_name.values() for path in own_files(f)}
"""The feature of each of our modules."""


def foreign(feature: Feature, used: set[str]) -> list[str]:
    """The modules among ``used`` that are of features which this one does not need."""
    below = {one.name for one in FEATURES.stack(feature.name)}
    return [f"{feature.name}: {name} of {OWNER[name]}" for name in used if OWNER[name] not in below]


@pytest.mark.parametrize("kind", PATHS)
def test_every_file_and_test_is_of_one_feature(kind):
    patterns = [p for one in FEATURES.by_name.values() for p in getattr(one, kind)]
    patterns += FEATURES.stays if kind == "tests" else []
    used = set()
    for path in PATHS[kind]:
        fit = sorted((p for p in patterns if fnmatchcase(path.removeprefix(CORE), p)), key=len)
        assert fit, f"{path} is of no feature"
        assert len([p for p in fit if len(p) == len(fit[-1])]) == 1, f"{path} is of two"
        used.add(fit[-1])
    assert set(patterns) == used, "each pattern decides about a path"


def test_every_patch_is_of_a_feature():
    of = [name for one in FEATURES.by_name.values() for name, _ in FEATURES.patches_of(one)]
    assert sorted(of) == sorted(FEATURES.patchset.series())


def test_imports_between_features_follow_the_graph():
    """Imports in functions and tests count too: a feature works with nothing but what it needs."""
    for feature in FEATURES.by_name.values():
        for path, source in own_files(feature).items():
            assert foreign(feature, imports(source, module_name(path), set(OWNER))) == []
        for name, _ in FEATURES.patches_of(feature):
            patch = FEATURES.patchset.series()[name].decode()
            added = re.findall(r"^\+\s*(?:from|import) ([\w.]+)", patch, re.MULTILINE)
            assert foreign(feature, OWNER.keys() & set(added)) == []


def test_no_test_asks_for_a_fixture_that_is_not_staged():
    functions = {
        path: [n for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.FunctionDef)]
        for path, source in FEATURES.tests.items()
    }
    lost = {
        function.name
        for path in FEATURES.tests
        if path.endswith("conftest.py") and not FEATURES.owner(path, "tests")
        for function in functions[path]
        if any("fixture" in ast.unparse(decorator) for decorator in function.decorator_list)
    }
    assert lost
    for path in filter(lambda path: FEATURES.owner(path, "tests"), FEATURES.tests):
        for function in functions[path]:
            asked = {argument.arg for argument in function.args.args}
            assert not lost & asked, f"{path}: {function.name}"


def test_the_patches_of_a_feature_apply_upon_what_it_needs(upstreams, tmp_path, monkeypatch):
    """They apply upon nothing else. On a release, that of pretrain_mimo.py needs a git checkout."""
    checkout = shutil.copytree(upstreams, tmp_path / "checkout")
    make_repository(checkout, {})
    monkeypatch.setattr("staging.stage.FORMATTERS", {})
    staging = Staging(STAGED, checkout)
    with staging.worktree() as tree:
        for name in STAGED.by_name.keys() - {"pretrain-mimo" * (not NEXT)}:
            for feature in STAGED.stack(name):
                staging.pick(feature, tree)
            git(tree, "reset", "-q", "--hard")


def test_a_message_says_how_to_run_the_tests_and_what_the_feature_needs():
    text = FEATURES.message(FEATURES.by_name["colocated-bridge"])
    for part in (
        "torchrun --nproc-per-node 8 -m pytest",
        "-p tests.unit_tests.rank_agreement",
        "Depends on: bridge-plan",
        "Figures: 8 layouts on 8 ranks",
    ):
        assert part in text
    alone = FEATURES.message(FEATURES.by_name["expert-bias"])
    assert "rank_agreement" not in alone and "torchrun" not in alone


def test_a_text_says_how_it_stands_to_upstream_how_it_is_used_what_it_gains_and_may_break():
    for feature in FEATURES.by_name.values():
        found = re.findall(r"^(Upstream|Use|Figures|Risk): .", feature.text, re.MULTILINE)
        assert found == ["Upstream", "Use", "Figures", "Risk"], feature.name
    page = (REPOSITORY / PAGE).read_text()
    assert len(re.findall("^### ", page, re.MULTILINE)) == len(FEATURES.by_name)


def test_only_the_example_needs_the_cpu_runtime():
    stacks = {name: {one.name for one in FEATURES.stack(name)} for name in FEATURES.by_name}
    found = {name for name, stack in stacks.items() if "cpu-runtime" in stack}
    assert found == {"cpu-runtime", "example"}


# Upstream's training loop needs Python 3.12 for this one name only.
PROGRAM = """
import sys, typing, typing_extensions, pytest
typing.override = typing_extensions.override
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_fixes_are_needed_and_work(upstreams, tmp_path):
    """Each file of a fix that upstream lacks fails on its tree, and passes on ours."""
    files = sorted(str(path.relative_to(FIXES)) for path in FIXES.rglob("test_*.py"))
    files = [path for path in files if STAGED.owner(path, "tests")]

    trees = [shutil.copytree(upstreams, tmp_path / name) for name in ("pristine", "applied")]
    assert run("apply", trees[1]).code == 0
    options = ["-q", "-rfE", "--tb=no", "--noconftest", "-p", "no:cacheprovider", "-Wignore"]
    options += ["-c", os.devnull, "--rootdir", str(FIXES), "--continue-on-collection-errors"]
    command = [sys.executable, "-c", PROGRAM, *options, *files]
    how = {"cwd": FIXES, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    both = [
        subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(tree)}, **how)
        for tree in trees
    ]
    for process, expected in zip(both, (files, []), strict=True):
        said, _ = process.communicate()
        assert process.returncode in (0, 1), said
        failed = re.findall(r"^(?:FAILED|ERROR) (?:.*fix_tests/)?([^\s:]+)", said, re.M)
        assert sorted(set(failed)) == expected
