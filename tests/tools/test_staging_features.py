# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The features of upstream PRs: each file belongs to exactly one, and imports follow the graph."""

import ast
import shutil
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from mini import REPOSITORY
from overlay.checkout import Checkout
from overlay.fetch import fetch
from overlay.git import write_files
from overlay.patchset import PatchSet
from staging.features import TESTS, Feature, Features
from staging.stage import apply_patches, patches_on
from test_import_circles import imports, name_of

FEATURES = Features(PatchSet(REPOSITORY))
DOCUMENT = REPOSITORY / "docs/contributor/upstream-prs.md"


@pytest.fixture(scope="module")
def upstreams(tmp_path_factory) -> Path:
    """A pristine tree of the pin."""
    lock, path = FEATURES.patchset.lock, tmp_path_factory.mktemp("staging") / "checkout"
    fetch(lock, REPOSITORY, path, lock.pin, None)
    return path


def own_files(feature: Feature) -> dict[str, Path]:
    """A feature's files, by the path at which the others import them."""
    tests = FEATURES.tests_of(feature).values()
    paths = {path: f"{TESTS}/{name}" for name, path in FEATURES.tests.items()}
    return FEATURES.files_of(feature) | {paths[path]: path for path in tests}


def owners() -> dict[str, str]:
    """The feature of each of our modules."""
    files = {path: f.name for f in FEATURES.all() for path in own_files(f) if path.endswith(".py")}
    return {
        name_of(REPOSITORY.joinpath(path).relative_to(REPOSITORY)): f for path, f in files.items()
    }


def fixtures(conftest: str) -> list[str]:
    """The fixtures that are defined in one of our files, by name."""
    nodes = ast.parse(FEATURES.tests[conftest].read_text()).body
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if any("fixture" in ast.unparse(d) for d in f.decorator_list)]


def test_every_file_patch_and_test_is_of_one_feature():
    assert FEATURES.problems() == []


def test_imports_between_features_follow_the_graph():
    """Imports in functions and tests count too: a feature works with nothing but what it needs."""
    owner, lost = owners(), []
    for feature in FEATURES.all():
        below = {one.name for one in FEATURES.stack(feature.name)}
        for path, source in own_files(feature).items():
            if path.endswith(".py"):
                used = imports(source, name_of(Path(path)), set(owner))
                lost += [f"{path} → {u} of {owner[u]}" for u in used if owner[u] not in below]
    assert lost == []


def test_no_test_asks_for_a_fixture_that_is_not_staged():
    stays = [path for path in FEATURES.tests if any(fnmatchcase(path, p) for p in FEATURES.stays)]
    lost = {name for path in stays if path.endswith("conftest.py") for name in fixtures(path)}
    assert lost
    for path in FEATURES.tests.keys() - set(stays):
        for node in ast.walk(ast.parse(FEATURES.tests[path].read_text())):
            if isinstance(node, ast.FunctionDef):
                assert not lost & {one.arg for one in node.args.args}, f"{path}: {node.name}"


def test_a_feature_that_changes_upstreams_files_names_upstreams_tests_of_them():
    assert [f.name for f in FEATURES.all() if f.patches and not f.upstream] == []


def test_imports_of_patches_follow_the_graph(upstreams, tmp_path):
    lost, owner, file = [], owners(), tmp_path / "file.py"
    of = {name: f for f in FEATURES.all() for name in FEATURES.patches_of(f)}
    for step in patches_on(FEATURES, Checkout(upstreams)).values():
        below = {one.name for one in FEATURES.stack(of[step.name].name)}
        for path, sides in step.files.items():
            found = []
            for data in sides:
                file.write_bytes(data)
                found.append(imports(file, name_of(Path(path)), set(owner)))
            new = found[1] - found[0]
            lost += [f"{step.name} → {u} of {owner[u]}" for u in new if owner[u] not in below]
    assert lost == []


@pytest.mark.parametrize("name", [name for name in FEATURES.order if name != "pretrain-mimo"])
def test_a_feature_applies_upon_what_it_needs(name, upstreams, tmp_path):
    """It applies upon nothing else. The patch of pretrain_mimo.py needs a git checkout."""
    steps = patches_on(FEATURES, Checkout(upstreams))
    shutil.copytree(upstreams / "megatron", tmp_path / "megatron")
    for feature in FEATURES.stack(name):
        patched = apply_patches(FEATURES, feature, steps, tmp_path)
        assert len(patched) >= bool(feature.patches)
        write_files(tmp_path, patched)


def test_a_fix_has_a_test_that_fails_without_it():
    for feature in FEATURES.all():
        if feature.fails:
            assert f"{TESTS}/{feature.fails}" in FEATURES.tests_of(feature)
    alone = [f.name for f in FEATURES.all() if f.fails and not f.needs]
    assert len(alone) >= 10


def test_a_description_says_how_to_run_the_tests_and_what_it_needs():
    text = FEATURES.pr_text(FEATURES.get("cp-bridge"))
    assert "torchrun --nproc-per-node 2 -m pytest" in text
    assert "-p tests.unit_tests.rank_agreement" in text
    assert "Process groups from a HyperCommGrid (`grids-and-groups`)" in text
    alone = FEATURES.pr_text(FEATURES.get("expert-bias"))
    assert "rank_agreement" not in alone and "torchrun" not in alone
    assert "Without this change, `tests/unit_tests/transformer/test_expert_bias.py` fails" in alone


def test_the_document_shows_the_graph():
    assert FEATURES.graph() in DOCUMENT.read_text(), (
        f"put the output of `tools/stage_upstream_pr.sh --graph` into {DOCUMENT}"
    )


def test_the_program_prints_the_graph():
    program = REPOSITORY / "tools/stage_upstream_pr.sh"
    done = subprocess.run([program, "--graph"], capture_output=True, text=True)
    assert done.stdout.strip() == FEATURES.graph()
