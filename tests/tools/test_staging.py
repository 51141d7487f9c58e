# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Staging: the features are whole, and a branch has them and leaves the checkout alone."""

import re
import shutil
from fnmatch import fnmatchcase

import pytest

from mini import (
    HEADER,
    NEXT,
    REPOSITORY,
    UPSTREAM,
    World,
    edit,
    git,
    make_repository,
    run,
    snapshot,
    write_tree,
)
from overlay.patchset import PatchSet
from overlay.source import module_name
from staging import __main__ as staging
from staging.features import Features
from test_import_circles import imports

PATCHSET = PatchSet(REPOSITORY)
FEATURES = Features(PATCHSET, PATCHSET.lock.next)
OF = {path: FEATURES.patterns[FEATURES.pattern(path) or ""] for path in FEATURES.sources}
MODULES = {module_name(path): name for path, name in OF.items() if name and path.endswith(".py")}


def test_every_file_and_patch_is_of_one_feature():
    used = {FEATURES.pattern(path) for path in FEATURES.sources}
    assert used == FEATURES.patterns.keys(), "each pattern decides about a path"
    for path in FEATURES.sources:
        fit = sorted(len(pattern) for pattern in used if fnmatchcase(path, pattern))
        assert fit.count(fit[-1]) == 1, path
    patches = "".join(FEATURES.patch(name).decode() for name in FEATURES.by_name)
    series = b"".join(PATCHSET.series(PATCHSET.lock.next).values()).decode()
    assert patches.count("\n+++ b/") == series.count("\n+++ b/")


@pytest.mark.parametrize("name", FEATURES.by_name)
def test_imports_lie_within_a_feature_and_what_it_needs(name):
    """Those in functions, tests and patches count too."""
    below = FEATURES.stack(name)
    used = re.findall(rb"^\+\s*(?:from|import) ([\w.]+)", FEATURES.patch(name), re.MULTILINE)
    found = {module.decode() for module in used} & MODULES.keys()
    for path in (path for path, one in OF.items() if one == name and path.endswith(".py")):
        found |= imports(FEATURES.sources[path], module_name(path), MODULES.keys())
    assert [module for module in found if MODULES[module] not in below] == []


def test_the_patches_of_a_feature_apply_upon_what_it_needs(upstreams, tmp_path):
    """A release lacks the examples."""
    features = FEATURES if NEXT else Features(PATCHSET)
    left_out = () if NEXT else ("--exclude=examples/*",)
    patches = {name: features.patch(name) for name in features.by_name}
    for path in set(re.findall(r"^\+\+\+ b/(.+)", b"".join(patches.values()).decode(), re.M)):
        if (upstreams / path).exists():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(upstreams / path, tmp_path / path)
    make_repository(tmp_path, {})
    for name in patches:
        for one in features.stack(name):
            staging.git(tmp_path, "apply", "--allow-empty", *left_out, stdin=patches[one])
        git(tmp_path, "reset", "-q", "--hard")


DATA = """
[landing]
"helpers.py" = "other_helpers.py"
[stays]
"only_here.py" = "a reason"
[first]
text = '''The first
What it is, on
two lines.'''
files = ["replaced.py"]
tests = ["helpers.py", "test_first.py"]
[second]
text = "The second"
needs = ["first"]
files = ["new/*", "examples/*"]
tests = ["test_second.py"]
"""
PASSES = "from tests.unit_tests.helpers import x\ndef test_it(): assert x == 1\n"


@pytest.fixture
def world(world: World, monkeypatch) -> World:
    world.as_git(UPSTREAM | {"tests/unit_tests/helpers.py": "upstream's\n"})
    tests = {"helpers": "x = 1\n", "only_here": "", "test_first": PASSES, "test_second": "x = 1\n"}
    files = {f"tests/unit_tests/{name}.py": text for name, text in tests.items()}
    write_tree(world.root, files | {"tools/staging/features.toml": DATA})
    for name in ("0001-first", "0002-second"):
        path = world.root / f"patches/{name}.patch"
        path.write_text(path.read_text().replace("Feature: testing", f"Feature: {name[5:]}"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    return world


def stage(world: World, *args: str):
    return run("--root", world.root, world.checkout, *args, program=staging.main)


def test_a_feature_comes_upon_those_that_it_needs_and_leaves_the_checkout_alone(world):
    write_tree(world.checkout, {"README.md": "edited\n"})
    files = {path: what for path, what in snapshot(world.checkout).items() if ".git" not in path}
    found = stage(world, "second", "--branch", "pr")
    assert (found.code, found.errors) == (0, [])
    at = lambda path: git(world.checkout, "show", path)  # noqa: E731
    assert at("pr~2:README.md") == UPSTREAM["README.md"].strip() == at("main:README.md")
    message = git(world.checkout, "log", "-1", "--format=%B", "pr~1")
    assert message.startswith("The first\n\nWhat it is, on two lines.\n\na test\n\n")
    assert "-m pytest --noconftest tests/unit_tests/test_first.py\n\nSigned-off-by: A" in message
    assert "Depends on: first" in git(world.checkout, "log", "-1", "--format=%B", "pr")
    changed = git(world.checkout, "diff", "--name-only", "pr~2", "pr~1").splitlines()
    core = ["megatron/core/a.py", "megatron/core/replaced.py", "megatron/core/sub/b.py"]
    assert changed == [*core, "tests/unit_tests/other_helpers.py", "tests/unit_tests/test_first.py"]
    test = at("pr:tests/unit_tests/test_first.py")
    assert test.startswith("from tests.unit_tests.other_helpers import x")
    assert "A_ten_and_a_half" in at("pr:megatron/core/a.py")
    assert at("pr:megatron/core/new/deep/module.py") == "new_module"
    after = {path: what for path, what in snapshot(world.checkout).items() if ".git" not in path}
    assert after == files and len(git(world.checkout, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize(("test", "code"), [(PASSES, 0), ("def test_it(): assert 0\n", 1)])
def test_a_trial_runs_a_features_tests_in_a_tree_of_its_own(world, test, code):
    write_tree(world.root, {"tests/unit_tests/test_first.py": test})
    found = stage(world, "first", "--try")
    assert (found.code, found.errors) == (code, ["error: tests fail: first"] * code)
    assert git(world.checkout, "branch", "--format=%(refname:short)") == "main"


@pytest.mark.parametrize(
    ("spoil", "code", "says"),
    [
        (lambda w: write_tree(w.root, {"tools/staging/features.toml": DATA.replace("second", "2")}),
         2, "second: no such feature; there are first, 2"),
        (lambda w: git(w.checkout, "config", "--unset", "user.name"), 1, "no name was given"),
        (lambda w: git(w.checkout, "branch", "pr"), 1, "already exists"),
        (lambda w: (w.checkout / ".git").rename(w.base / "x"), 1, "not a git repository"),
        (lambda w: w.patch("0003-third", edit("megatron/core/a.py", "a_3", "x"),
                           HEADER.replace("testing", "second")),
         1, "second: git apply: error: megatron/core/a.py: patch does not apply"),
    ],
)  # fmt: skip
def test_refusals_are_a_line_and_make_no_branch(world, monkeypatch, spoil, code, says):
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.delenv(f"GIT_{name}_NAME", raising=False)
    spoil(world)
    found = stage(world, "second", "--branch", "pr")
    assert (found.code, found.out) == (code, []) and says in found.errors[0]
    if "git" not in says and "exists" not in says:
        assert git(world.checkout, "branch", "--format=%(refname:short)") == "main"
