# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Staging on a miniature upstream: what the branch holds, and that all else stays as it was."""

from pathlib import Path

import pytest

from mini import UPSTREAM, Result, World, git, run, snapshot, write_tree
from staging import cli, trial
from staging import stage as staging
from upstream_tests.outcomes import Outcome, Outcomes

OURS = "# Copyright (c) 2026, Megatron MIMO overlay contributors.\n"
TEXT = 'what = "The what."\nwhy = "The why."\ndesign = "The design."\n'
FEATURES = f"""
header = "# Upstream's line"
[landing]
"helpers.py" = "other_helpers.py"
[stays]
"only_here.py" = "a reason"
[feature.second]
title = "The second"
{TEXT}
needs = ["first"]
files = ["megatron/core/new/*", "examples/*"]
patches = ["0002"]
tests = ["test_second.py"]
[feature.first]
title = "The first"
{TEXT}
files = ["megatron/core/replaced.py"]
patches = ["0001"]
tests = ["helpers.py", "test_first.py"]
fails = "test_first.py"
[feature.alone]
title = "Alone"
{TEXT}
"""
TESTS = {
    "tests/unit_tests/helpers.py": "x = 1\n",
    "tests/unit_tests/test_first.py": OURS + "from tests.unit_tests.helpers import x\n",
    "tests/unit_tests/only_here.py": "",
    "tools/staging/fix_tests/test_second.py": "",
    "tools/staging/features.toml": FEATURES,
}


@pytest.fixture
def staged(world: World, monkeypatch) -> World:
    """A git checkout with a user, and formatters that do nothing."""
    world.as_git(UPSTREAM | {"tests/unit_tests/helpers.py": "upstream's\n"})
    git(world.checkout, "config", "user.name", "A. Contributor")
    git(world.checkout, "config", "user.email", "a@example.org")
    write_tree(world.root, TESTS)
    monkeypatch.setattr(staging, "FORMATTERS", {})
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    return world


def stage(world: World, *args: str) -> Result:
    arguments = ["--root", world.root, world.checkout, "--branch", "pr", *args]
    return run(*arguments, program=cli.main)


def at(world: World, path: str, revision: str = "pr") -> str:
    return git(world.checkout, "show", f"{revision}:{path}")


def subjects(world: World) -> list[str]:
    return git(world.checkout, "log", "--reverse", "--format=%s", "main..pr").splitlines()


def test_a_feature_comes_upon_those_that_it_needs(staged):
    assert stage(staged, "--feature", "second").code == 0
    assert subjects(staged) == ["The first", "The second"]
    assert "A_three" in at(staged, "megatron/core/a.py", "pr~1")
    assert "A_ten_and_a_half" not in at(staged, "megatron/core/a.py", "pr~1")
    assert "A_ten_and_a_half" in at(staged, "megatron/core/a.py")
    assert at(staged, "megatron/core/replaced.py") == "ours_instead"
    assert at(staged, "megatron/core/new/deep/module.py") == "new_module"
    assert git(staged.checkout, "ls-tree", "pr", "examples/mimo/run.py").startswith("100755")


def test_a_feature_alone_has_nothing_of_others(staged):
    assert stage(staged, "--feature", "first").code == 0
    changed = git(staged.checkout, "diff", "--name-only", "main", "pr").splitlines()
    assert changed == [
        "megatron/core/a.py",
        "megatron/core/replaced.py",
        "megatron/core/sub/b.py",
        "tests/unit_tests/other_helpers.py",
        "tests/unit_tests/test_first.py",
    ]


def test_all_stages_each_feature_once(staged):
    # A feature without any file cannot be a commit.
    data = staged.root / "tools/staging/features.toml"
    data.write_text(data.read_text().partition("[feature.alone]")[0])
    assert stage(staged, "--all").code == 0
    assert subjects(staged) == ["The first", "The second"]


def test_tests_land_beside_upstreams_own(staged):
    stage(staged, "--feature", "first")
    assert at(staged, "tests/unit_tests/helpers.py") == "upstream's"
    assert at(staged, "tests/unit_tests/other_helpers.py") == "x = 1"
    test = at(staged, "tests/unit_tests/test_first.py")
    assert test == f"# Upstream's line\n{OURS}from tests.unit_tests.other_helpers import x"


def test_commits_are_signed_off_and_say_why(staged):
    stage(staged, "--feature", "first")
    body = git(staged.checkout, "log", "-1", "--format=%b", "pr")
    for text in ("The what.", "The why.", "The design."):
        assert text in body
    assert body.endswith("Signed-off-by: A. Contributor <a@example.org>")


def test_descriptions_and_patches_lie_beside_the_checkout(staged):
    stage(staged, "--feature", "second")
    out = staged.base / "checkout-prs/pr"
    assert sorted(path.name for path in out.iterdir()) == [
        "0001-The-first.patch",
        "0002-The-second.patch",
        "first",
        "second",
    ]
    assert "- The first (`first`)" in (out / "second/PR.md").read_text()
    git(staged.checkout, "switch", "-q", "-c", "mailed")
    git(staged.checkout, "am", "-q", *(str(path) for path in sorted(out.glob("*.patch"))))
    assert git(staged.checkout, "diff", "mailed", "pr") == ""


@pytest.mark.parametrize("feature", ["second", "alone"])
def test_the_checkout_stays_as_it_was(staged, feature):
    """It stays also where staging fails, as for a feature without any change."""

    def state():
        head = (
            git(staged.checkout, "symbolic-ref", "HEAD"),
            git(staged.checkout, "rev-parse", "HEAD"),
        )
        files = {k: v for k, v in snapshot(staged.checkout).items() if not k.startswith(".git")}
        index = git(staged.checkout, "ls-files", "--stage")
        return head, files, index, git(staged.checkout, "worktree", "list")

    before = state()
    code = stage(staged, "--feature", feature).code
    assert state() == before
    branches = git(staged.checkout, "branch", "--format=%(refname:short)").splitlines()
    assert (code, branches) == ((0, ["main", "pr"]) if feature == "second" else (1, ["main"]))


TRIED = {
    "tests/unit_tests/test_first.py": """
import pathlib
def test_that_the_second_is_not_here():
    assert not pathlib.Path("megatron/core/new").exists()
def test_that_the_first_is_here():
    assert "ours" in pathlib.Path("megatron/core/replaced.py").read_text()
""",
    "tools/staging/fix_tests/test_second.py": "def test_that_fails():\n    assert False\n",
}


class OneTest:
    """Stands in for ranks: one of upstream's tests passes only where nothing is staged."""

    def __init__(self, tree: Path, *_):
        self.staged = "A_three" in (tree / "megatron/core/a.py").read_text()

    def run(self, files: list[str], *_) -> Outcomes:
        return {f"{files[0]}::test": Outcome("failed" if self.staged else "passed")}


def test_trying_runs_the_tests_of_each_feature_in_a_tree_of_its_own(staged, monkeypatch):
    monkeypatch.setattr(trial, "World", OneTest)
    write_tree(staged.root, TRIED)
    data = staged.root / "tools/staging/features.toml"
    upstream = 'upstream = ["tests/unit_tests/test_theirs.py"]\nfails ='
    data.write_text(data.read_text().replace("fails =", upstream))
    write_tree(staged.checkout, {"tests/unit_tests/test_theirs.py": ""})
    git(staged.checkout, "add", ".")
    git(staged.checkout, "commit", "-qm", "upstream's test")
    found = run("--root", staged.root, staged.checkout, "--try", "first", program=cli.main)
    assert (found.code, found.out[2:]) == (
        1,
        ["| first | 1 | 2 passed | 1 | 0 | 1 |", "lost: tests/unit_tests/test_theirs.py::test"],
    )
    found = run("--root", staged.root, staged.checkout, "--try", "second", program=cli.main)
    assert (found.code, found.out[2:]) == (1, ["| second | 1 | **1 failed** | 0 | 0 | 0 |"])
    assert git(staged.checkout, "branch", "--format=%(refname:short)") == "main"


def test_a_trial_whose_tests_are_all_skipped_has_not_passed(staged):
    skips = "import pytest\n@pytest.mark.skip\ndef test_that_skips():\n    pass\n"
    write_tree(staged.root, {"tests/unit_tests/test_first.py": skips})
    found = run("--root", staged.root, staged.checkout, "--try", "first", program=cli.main)
    assert (found.code, found.out[2:]) == (1, ["| first | 1 | **1 skipped** | 0 | 0 | 0 |"])


def _dirty(world: World) -> None:
    (world.checkout / "README.md").write_text("edited\n")


def _no_name(world: World) -> None:
    git(world.checkout, "config", "--unset", "user.name")


def _branch_is_there(world: World) -> None:
    git(world.checkout, "branch", "pr")


def _edited(world: World) -> None:
    (world.checkout / "megatron/core/a.py").write_text("another\n")
    git(world.checkout, "commit", "-aqm", "an edit")


def _not_empty(world: World) -> None:
    write_tree(world.base / "checkout-prs/pr", {"file": ""})


def _no_git(world: World) -> None:
    (world.checkout / ".git").rename(world.base / "elsewhere")


def _other_version(world: World) -> None:
    path = world.checkout / "megatron/core/package_info.py"
    path.write_text(path.read_text().replace("PATCH = 3", "PATCH = 9"))
    git(world.checkout, "commit", "-aqm", "another version")


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (_dirty, 5, "is not clean: README.md"),
        (_no_name, 2, "set git config user.name and user.email"),
        (_branch_is_there, 5, "there is a branch pr already"),
        (_edited, 4, "megatron/core/a.py differs from v1.2.3"),
        (_not_empty, 2, "is not empty"),
        (_no_git, 3, "is not the top of a git checkout"),
        (_other_version, 3, "is Megatron-LM 1.2.9; this overlay needs 1.2.3 or 1.2.4"),
    ],
)
def test_refusals_are_one_line(staged, spoil, code, message):
    spoil(staged)
    found = stage(staged, "--feature", "first")
    assert (found.code, len(found.out + found.errors)) == (code, 1)
    assert message in found.errors[0]


def test_an_unknown_feature_is_refused_with_the_known_ones(staged):
    found = stage(staged, "--feature", "third")
    known = "error: --feature third: no such feature; there are second, first, alone"
    assert (found.code, found.out, found.errors) == (2, [], [known])


def test_missing_formatters_are_named(staged, monkeypatch):
    monkeypatch.setattr(staging, "FORMATTERS", {"no_such_formatter": ""})
    found = stage(staged, "--feature", "first")
    (text,) = found.errors
    assert found.code == 1
    assert "no_such_formatter missing" in text and "pip install '.[staging]'" in text


def test_formatters_leave_files_that_upstream_left(tmp_path: Path):
    pytest.importorskip("black")
    pytest.importorskip("isort")
    settings = '[tool.black]\nskip_string_normalization = true\n[tool.isort]\nprofile = "black"\n'
    files = {"pyproject.toml": settings, "ours.py": "x = f( 'a' )\n", "theirs.py": "import b, a\n"}
    write_tree(tmp_path, files)
    left = staging._unformatted(tmp_path, ["theirs.py"])
    assert left == {"isort": {"theirs.py"}, "black": set()}
    for tool in staging.FORMATTERS:
        staging._format(tmp_path, tool, [path for path in files if path not in left[tool]])
    assert (tmp_path / "ours.py").read_text() == "x = f('a')\n"
    assert (tmp_path / "theirs.py").read_text() == "import b, a\n"
