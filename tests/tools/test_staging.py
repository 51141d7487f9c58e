# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Staging: the features are whole, and a branch has them and leaves the checkout alone."""

import re
import shutil
from pathlib import Path

import pytest

import mini
from mini import NEXT, REPOSITORY, UPSTREAM, Result, World, git, imports, write_tree
from overlay.fetch import fetch
from overlay.git import call
from overlay.patchset import PatchSet
from overlay.source import module_name
from staging import __main__ as staging
from staging.features import Features

PATCHSET = PatchSet(REPOSITORY)
FEATURES = Features(PATCHSET, PATCHSET.lock.next)


def test_every_file_and_patch_is_of_one_feature():
    fit = {path: FEATURES.fit(path) for path in FEATURES.sources}
    assert [path for path, patterns in fit.items() if not patterns] == []
    decide = {[p for p in patterns if len(p) == len(patterns[-1])][0] for patterns in fit.values()}
    assert decide == {patterns[-1] for patterns in fit.values()}, "two patterns of one length"
    assert decide == FEATURES.patterns.keys(), "each pattern decides about a path"
    staged = "".join(FEATURES.patch(name).decode() for name in FEATURES.by_name)
    series = b"".join(PATCHSET.series(PATCHSET.lock.next).values()).decode()
    assert staged.count("\n+++ b/") == series.count("\n+++ b/")


def test_imports_lie_within_a_feature_and_what_it_needs():
    """Those in functions, tests and patches count too."""
    of = {path: FEATURES.patterns[FEATURES.fit(path)[-1]] for path in FEATURES.sources}
    python = {path: name for path, name in of.items() if name and path.endswith(".py")}
    tests = (path.relative_to(REPOSITORY) for path in (REPOSITORY / "tests").rglob("*.py"))
    modules = {module_name(path.as_posix()): "unstaged" for path in tests}
    modules |= {module_name(path): name for path, name in python.items()}
    for name in FEATURES.by_name:
        patch = FEATURES.patch(name).decode()
        used = set(re.findall(r"^\+\s*(?:from|import) ([\w.]+)", patch, re.MULTILINE))
        for path in (path for path, one in python.items() if one == name):
            found = imports(FEATURES.sources[path], module_name(path))
            used |= {full if full in modules else full.rpartition(".")[0] for full in found}
        # The example is not submitted: some of its tests use this repository's whole runs.
        below = [*FEATURES.stack(name), *["unstaged"] * (name == "example")]
        assert [one for one in used & modules.keys() if modules[one] not in below] == [], name


def test_the_patches_of_a_feature_apply_upon_what_it_needs(tmp_path):
    """A release lacks the examples."""
    features = FEATURES if NEXT else Features(PATCHSET)
    patches = {name: features.patch(name) for name in features.by_name}
    touched = re.findall(r"^\+\+\+ b/(meg.+)", b"".join(patches.values()).decode(), re.MULTILINE)
    upstream = tmp_path / "upstream"
    fetch(PATCHSET.lock, REPOSITORY, upstream, directory=NEXT and Path(NEXT))
    tree = tmp_path / "tree"
    mini.make_repository(tree, {path: (upstream / path).read_text() for path in touched})
    for name in patches:
        for one in features.stack(name):
            how = ("apply", "--allow-empty", "--exclude=examples/*")
            call(tree, *how, stdin=patches[one])
        git(tree, "reset", "-q", "--hard")


DATA = """
[landing]
"helpers.py" = "other_helpers.py"
[stays]
"only_here.py" = "a reason"
[first]
text = '''The first
What it is, on
two lines.'''
files = ["replaced.py", "helpers.py", "test_first.py"]
[second]
text = "The second"
needs = ["first"]
files = ["new/*", "examples/*"]
"""
PASSES = "from tests.unit_tests.helpers import x\ndef test_it(): assert x == 1\n"


@pytest.fixture
def world(world: World, monkeypatch) -> World:
    shutil.rmtree(world.root / "patches/next")
    helpers = {"tests/unit_tests/helpers.py": "upstream's\n"}
    world.as_tree(UPSTREAM | helpers, mini.make_repository)
    tests = {"helpers": "x = 1\n", "only_here": "", "test_first": PASSES}
    files = {f"tests/unit_tests/{name}.py": text for name, text in tests.items()}
    write_tree(world.root, files | {"tools/staging/features.toml": DATA})
    for name in ("0001-first", "0002-second"):
        text = world.patch_text(name).replace("Feature: testing", f"Feature: {name[5:]}")
        (world.root / f"patches/{name}.patch").write_text(text)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    return world


def stage(world: World, *args: str) -> Result:
    return mini.run("--root", world.root, world.checkout, *args, program=staging.main)


def test_a_feature_comes_upon_those_that_it_needs_and_leaves_the_checkout_alone(world):
    write_tree(world.checkout, {"README.md": "edited\n"})
    found = stage(world, "second", "--branch", "pr")
    assert (found.code, found.errors) == (0, [])
    assert git(world.checkout, "status", "--short", "--branch") == "## main\n M README.md"
    assert len(git(world.checkout, "worktree", "list").splitlines()) == 1
    message = git(world.checkout, "log", "-1", "--format=%B", "pr~1")
    assert message.startswith("The first\n\nWhat it is, on two lines.\n\na test\n\n")
    assert "-m pytest --noconftest tests/unit_tests/test_first.py\n\nSigned-off-by: A" in message
    assert "Depends on: first" in git(world.checkout, "log", "-1", "--format=%B", "pr")
    changed = git(world.checkout, "diff", "--name-only", "main", "pr~1").splitlines()
    core = ["megatron/core/a.py", "megatron/core/replaced.py", "megatron/core/sub/b.py"]
    assert changed == [*core, "tests/unit_tests/other_helpers.py", "tests/unit_tests/test_first.py"]
    test = git(world.checkout, "show", "pr:tests/unit_tests/test_first.py")
    assert test.startswith("from tests.unit_tests.other_helpers import x")
    assert "A_ten_and_a_half" in git(world.checkout, "show", "pr:megatron/core/a.py")
    assert git(world.checkout, "show", "pr:megatron/core/new/deep/module.py") == "new_module"


def test_a_trial_runs_a_features_tests_in_a_tree_of_its_own(world):
    assert stage(world, "first", "--try").code == 0
    write_tree(world.root, {"tests/unit_tests/test_first.py": "def test_it(): assert 0\n"})
    assert stage(world, "first", "--try").errors == ["error: tests fail: first"]


def test_an_unknown_feature_and_a_patch_that_does_not_apply_are_named(world):
    assert stage(world, "third", "--branch", "pr").errors == [
        "error: third: no such feature; there are first, second"
    ]
    second = world.root / "patches/0002-second.patch"
    second.write_text(second.read_text().replace("a_10", "x"))
    (said,) = stage(world, "second", "--branch", "pr").errors
    assert "second: git apply: error: megatron/core/a.py: patch does not apply" in said
