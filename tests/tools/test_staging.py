# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Staging on a miniature upstream: what the branch holds, and that all else stays as it was."""

from pathlib import Path

import pytest

from mini import HEADER, UPSTREAM, Result, World, edit, git, run, snapshot, write_tree
from staging import __main__ as program
from staging import stage as staging
from staging.features import Features

OURS = "# Copyright (c) 2026, Megatron MIMO overlay contributors.\n"
FEATURES = """
header = "# Upstream's line"
[landing]
"helpers.py" = "other_helpers.py"
[stays]
"only_here.py" = "a reason"
[feature.second]
needs = ["first"]
files = ["new/*", "examples/*"]
tests = ["test_second.py"]
[feature.first]
files = ["replaced.py"]
tests = ["helpers.py", "test_first.py"]
[feature.alone]
"""
PAGE = """
### The second (`second`)

The what, on
two lines.

The why.

## Others

### The first (`first`)

The what.

### Alone (`alone`)

Text.
"""
DATA = "tools/staging/features.toml"
TESTS = {
    "tests/unit_tests/helpers.py": "x = 1\n",
    "tests/unit_tests/test_first.py": OURS + "from tests.unit_tests.helpers import x\n",
    "tests/unit_tests/only_here.py": "",
    "tools/staging/fix_tests/test_second.py": "",
    DATA: FEATURES,
    "docs/contributor/upstream-features.md": PAGE,
}
THEIRS = {"tests/unit_tests/helpers.py": "upstream's\n"}


@pytest.fixture
def staged(world: World, monkeypatch) -> World:
    """A git checkout, and formatters that do nothing."""
    world.as_git(UPSTREAM | THEIRS)
    write_tree(world.root, TESTS)
    for name in ("0001-first", "0002-second"):
        path = world.root / f"patches/{name}.patch"
        path.write_text(path.read_text().replace("Feature: testing", f"Feature: {name[5:]}"))
    world.lock()
    monkeypatch.setattr(staging, "FORMATTERS", {})
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    return world


def stage(world: World, *args: str) -> Result:
    return run("--root", world.root, world.checkout, *args, program=program.main)


def at(world: World, path: str, revision: str = "pr") -> str:
    return git(world.checkout, "show", f"{revision}:{path}")


def state(world: World) -> list:
    """All of the checkout but the branches that it may get."""
    commands = ["symbolic-ref HEAD", "rev-parse HEAD", "ls-files --stage", "worktree list"]
    files = {k: v for k, v in snapshot(world.checkout).items() if not k.startswith(".git")}
    return [files, *(git(world.checkout, *command.split()) for command in commands)]


def test_a_feature_comes_upon_those_that_it_needs_and_leaves_the_checkout_alone(staged):
    before = state(staged)
    assert stage(staged, "second", "--branch", "pr").code == 0
    assert state(staged) == before
    log = git(staged.checkout, "log", "--reverse", "--format=%s", "main..pr").splitlines()
    assert log == ["The first", "The second"]
    body = git(staged.checkout, "log", "-1", "--format=%b", "pr")
    signed = "Signed-off-by: A. Contributor <a@example.org>"
    assert all(
        text in body for text in ("on two lines.\n\nThe why.", "a test", "Depends on: first")
    )
    assert "these fail:\ntests/unit_tests/test_second.py" in body and body.endswith(signed)
    assert "A_ten_and_a_half" in at(staged, "megatron/core/a.py")
    assert at(staged, "megatron/core/new/deep/module.py") == "new_module"
    assert git(staged.checkout, "ls-tree", "pr", "examples/mimo/run.py").startswith("100755")

    # The first has nothing of the second, and lands beside upstream's tests.
    changed = git(staged.checkout, "diff", "--name-only", "main", "pr~1").splitlines()
    core = ["megatron/core/a.py", "megatron/core/replaced.py", "megatron/core/sub/b.py"]
    tests = ["tests/unit_tests/other_helpers.py", "tests/unit_tests/test_first.py"]
    assert changed == core + tests
    assert "A_three" in (text := at(staged, "megatron/core/a.py", "pr~1"))
    assert "A_ten_and_a_half" not in text
    assert at(staged, "megatron/core/replaced.py", "pr~1") == "ours_instead"
    assert at(staged, "tests/unit_tests/other_helpers.py", "pr~1") == "x = 1"
    test = at(staged, "tests/unit_tests/test_first.py", "pr~1")
    assert test == f"# Upstream's line\n{OURS}from tests.unit_tests.other_helpers import x"


def test_all_stages_each_feature_once_or_makes_no_branch(staged):
    assert "nothing" in stage(staged, "--branch", "pr").errors[0]  # to commit for one of them
    assert git(staged.checkout, "branch", "--format=%(refname:short)") == "main"
    write_tree(staged.root, {DATA: FEATURES.partition("[feature.alone]")[0]})
    assert stage(staged, "--branch", "pr").code == 0
    assert git(staged.checkout, "rev-list", "--count", "main..pr") == "2"


FIRST = """
import pathlib
def test_that_the_first_is_here_and_the_second_is_not():
    assert not pathlib.Path("megatron/core/new").exists()
    assert "ours" in pathlib.Path("megatron/core/replaced.py").read_text()
"""
SKIPS = "import pytest\n@pytest.mark.skip\ndef test_that_skips():\n    pass\n"


@pytest.mark.parametrize(
    ("feature", "test", "says"),
    [
        ("first", FIRST, "1 passed"),
        ("first", SKIPS, "FAILED: 1 skipped: "),
        ("second", "def test_that_fails():\n    assert 0\n", "FAILED: 1 failed: "),
    ],
)
def test_trying_runs_the_tests_of_each_feature_in_a_tree_of_its_own(
    staged, monkeypatch, feature, test, says
):
    monkeypatch.setattr(staging, "LOGS", staged.base / "logs")
    folder = {"first": "tests/unit_tests", "second": "tools/staging/fix_tests"}[feature]
    write_tree(staged.root, {f"{folder}/test_{feature}.py": test})
    found = stage(staged, feature, "--try")
    (line,) = found.out
    assert line.startswith(f"{feature} on 1 ranks: {says}")
    assert found.code == int("FAILED" in says)
    assert git(staged.checkout, "branch", "--format=%(refname:short)") == "main"


def test_tests_that_are_skipped_on_every_number_of_ranks_fail_a_feature(staged, monkeypatch):
    monkeypatch.setattr(staging, "LOGS", staged.base / "logs")
    monkeypatch.setattr(
        Features, "commands", lambda *_: dict.fromkeys((1, 2), "echo 1 skipped in 0s")
    )
    found = stage(staged, "first", "--try")
    assert found.code == 1
    assert found.out[0] == "first on 1 ranks: 1 skipped"
    assert found.out[1].startswith("first on 2 ranks: FAILED: 1 skipped: ")


def commit_edit(path: str, old: str, new: str):
    def spoil(world: World) -> None:
        world.replace(path, old, new)
        git(world.checkout, "commit", "-aqm", "an edit")

    return spoil


def conflict(world: World) -> None:
    """Let the second feature change what the first has changed, without needing it."""
    diff = edit("megatron/core/a.py", "a_3", "a three").replace("-a_3", "-A_three")
    world.patch("0003-third", diff, HEADER.replace("testing", "second"))
    write_tree(world.root, {DATA: FEATURES.replace('needs = ["first"]', "")})
    world.lock()


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (lambda w: write_tree(w.checkout, {"README.md": "x"}), 5, "is not clean: README.md"),
        (lambda w: git(w.checkout, "config", "--unset", "user.name"), 1, "git: fatal: no name"),
        (lambda w: git(w.checkout, "branch", "pr"), 1, "a branch named 'pr' already exists"),
        (commit_edit("megatron/core/a.py", "a_1", "x"), 4, "core/a.py differs from"),
        (lambda w: (w.checkout / ".git").rename(w.base / "x"), 3,
         "is not the top of a git checkout"),
        (commit_edit("megatron/core/package_info.py", "PATCH = 3", "PATCH = 9"), 3,
         "is Megatron-LM 1.2.9; this overlay needs 1.2.3 or 1.2.4"),
        (lambda w: write_tree(w.root, {DATA: FEATURES.replace("second", "other")}), 2,
         "second: no such feature; there are first, alone, other"),
        (conflict, 1, "second: 0003-third.patch does not apply to megatron/core/a.py alone"),
        (lambda w: staging.FORMATTERS.update(no_such_formatter=""), 1,
         "no_such_formatter missing"),
    ],
)  # fmt: skip
def test_refusals_are_one_line_and_make_no_branch(staged, monkeypatch, spoil, code, message):
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.delenv(f"GIT_{name}_NAME", raising=False)
    spoil(staged)
    found = stage(staged, "second", "--branch", "pr")
    assert (found.code, len(found.out)) == (code, 0)
    assert message in found.errors[0]
    if code != 3 and "exists" not in message:
        assert git(staged.checkout, "branch", "--format=%(refname:short)") == "main"


def test_formatters_leave_files_that_upstream_left(tmp_path: Path):
    settings = '[tool.black]\nskip_string_normalization = true\n[tool.isort]\nprofile = "black"\n'
    files = {"pyproject.toml": settings, "ours.py": "x = f( 'a' )\n", "theirs.py": "import b, a\n"}
    write_tree(tmp_path, files)
    for tool, expected in (("isort", {"theirs.py"}), ("black", set())):
        left = staging._unformatted(tmp_path, tool, ["theirs.py"])
        assert left == expected
        staging._format(tmp_path, tool, [path for path in files if path not in left])
    assert (tmp_path / "ours.py").read_text() == "x = f('a')\n"
    assert (tmp_path / "theirs.py").read_text() == "import b, a\n"
