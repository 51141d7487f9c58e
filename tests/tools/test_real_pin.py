# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The real patch set on every version of the lock: canonical, quick to apply, and back again.

An sdist that is not in ``build/cache`` is fetched.
"""

import os
import shutil

import pytest

from mini import REPOSITORY, run, snapshot
from overlay.fetch import fetch
from overlay.patchset import OVERLAY_ROOTS, Lock, PatchSet
from overlay.rules import MOST_PATCHES, declared
from overlay.rules import MOST_REPLACEMENTS as MOST

LOCK = Lock.read(REPOSITORY / "patches/upstream.toml")
APPLY_SECONDS, DRIFT_SECONDS = 5.0, 10.0


@pytest.fixture(params=LOCK.locked)
def checkout(tmp_path, request):
    fetch(LOCK, REPOSITORY, tmp_path / "checkout", request.param, None)
    return tmp_path / "checkout"


def cpu_seconds() -> float:
    """CPU time of this process and the children it waited for, because the machine may be busy."""
    return sum(os.times()[:4])


def test_patches_and_lock_are_canonical():
    result = run("refresh", "--check")
    assert result.code == 0, result.errors


def test_every_patch_has_its_header_and_the_set_is_small():
    result = run("headers")
    assert result.code == 0, result.errors


def test_the_docs_count_patches_and_replacements():
    page = (REPOSITORY / "docs/contributor/patch-set.md").read_text()
    patches, replaced = len(PatchSet(REPOSITORY).series()), len(declared(REPOSITORY))
    assert f"| patches | {patches} | {MOST_PATCHES} |" in page
    assert f"| replacements at run time | {replaced} | {MOST} |" in page


def test_apply_and_revert_give_the_original_tree(checkout):
    original = snapshot(checkout)
    assert run("apply", checkout).code == 0
    done, *notices = run("apply", checkout).out
    assert done == "already applied"
    assert all(notice.startswith("left out: ") for notice in notices)  # the sdist has no scripts
    assert run("apply", checkout, "--revert").code == 0
    assert snapshot(checkout) == original


def test_apply_takes_seconds(checkout):
    start = cpu_seconds()
    assert run("apply", checkout).code == 0
    assert cpu_seconds() - start < APPLY_SECONDS


def test_drift_finds_no_work_in_the_versions_of_the_lock(checkout):
    start = cpu_seconds()
    result = run("drift", checkout)
    assert result.code == 0, "\n".join(result.out)
    assert cpu_seconds() - start < DRIFT_SECONDS


@pytest.mark.parametrize("checkout", [LOCK.pin], indirect=True)
def test_refresh_from_an_applied_tree_gives_the_same_patches(checkout, tmp_path):
    root = tmp_path / "ours"
    for folder in ("patches", "build/cache", *OVERLAY_ROOTS):
        shutil.copytree(REPOSITORY / folder, root / folder)
    assert run("--root", root, "apply", checkout).code == 0
    before = snapshot(root)
    assert run("--root", root, "refresh", checkout).code == 0
    assert snapshot(root) == before
