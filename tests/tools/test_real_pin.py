# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The real patch set on every version of the lock: canonical, quick to apply, and back again.

An sdist that is not in ``build/cache`` is fetched. ``NEXT`` names a git directory of upstream that
has the next version; without it, that version is left out.
"""

import shutil
from pathlib import Path

import pytest

from mini import NEXT, REPOSITORY, run, snapshot
from overlay.checkout import Checkout
from overlay.fetch import fetch
from overlay.patchset import OVERLAY_ROOTS, PatchSet
from overlay.rules import MOST_PATCHES, MOST_REPLACEMENTS, declared

PATCHSET = PatchSet(REPOSITORY)


@pytest.fixture(params=PATCHSET.lock.files)
def checkout(tmp_path, request) -> Path:
    is_next = request.param == PATCHSET.lock.next
    if is_next and not NEXT:
        pytest.skip("no git directory of upstream's main at hand: set NEXT to one")
    directory = Path(NEXT) if is_next else None
    fetch(PATCHSET.lock, REPOSITORY, tmp_path / "checkout", request.param, None, directory)
    return tmp_path / "checkout"


def test_patches_lock_and_headers_are_in_order_and_the_docs_count_them():
    following = ["--next", NEXT] if NEXT else []
    for command in (["refresh", "--check", *following], ["headers"]):
        result = run(*command)
        assert result.code == 0, result.errors
    page = (REPOSITORY / "docs/contributor/patch-set.md").read_text()
    assert f"| patches | {len(PATCHSET.series())} | {MOST_PATCHES} |" in page
    replaced = len(declared(REPOSITORY))
    assert f"| replacements at run time | {replaced} | {MOST_REPLACEMENTS} |" in page


def test_drift_finds_no_work_and_apply_and_revert_give_the_original_tree(checkout):
    original = snapshot(checkout)
    result = run("drift", checkout)
    left = [line for line in result.out if line.startswith(("  body ", "  perhaps "))]
    are_all = f"upstream's names that our code uses: {len(left)} changed" in result.out
    is_next = Checkout(checkout).version == PATCHSET.lock.next  # its tests met what is left
    assert result.code == 0 or (is_next and are_all), "\n".join(result.out)
    assert run("apply", checkout).code == 0
    done, *notices = run("apply", checkout).out
    assert done == "already applied"
    assert all(notice.startswith("left out: ") for notice in notices)  # the sdist has no scripts
    assert run("apply", checkout, "--revert").code == 0
    assert snapshot(checkout) == original


@pytest.mark.parametrize("checkout", [PATCHSET.lock.pin], indirect=True)
def test_refresh_from_an_applied_tree_gives_the_same_patches(checkout, tmp_path):
    root = tmp_path / "ours"
    for folder in ("patches", "build/cache", *OVERLAY_ROOTS):
        shutil.copytree(REPOSITORY / folder, root / folder)
    assert run("--root", root, "apply", checkout).code == 0
    before = snapshot(root)
    assert run("--root", root, "refresh", checkout).code == 0
    assert snapshot(root) == before
