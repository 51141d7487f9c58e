# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The real patch set on every version of the lock: canonical, quick to apply, and back again.

An sdist that is not in ``build/cache`` is fetched. ``NEXT`` names a git directory of upstream that
has the next version; without it, that version is left out.
"""

from pathlib import Path

import pytest

from mini import NEXT, REPOSITORY, run, snapshot
from overlay.fetch import fetch
from overlay.patchset import PatchSet
from overlay.rules import MOST_PATCHES, MOST_REPLACEMENTS, declared

PATCHSET = PatchSet(REPOSITORY)


def test_patches_lock_and_headers_are_in_order_and_the_docs_count_them():
    for command in (["refresh", "--check"], ["headers"]):
        result = run(*command)
        assert result.code == 0, result.errors
    page = (REPOSITORY / "docs/contributor/patch-set.md").read_text()
    assert f"| patches | {len(PATCHSET.series())} | {MOST_PATCHES} |" in page
    replaced = len(declared(REPOSITORY))
    assert f"| replacements at run time | {replaced} | {MOST_REPLACEMENTS} |" in page


@pytest.mark.parametrize("version", PATCHSET.lock.versions)
def test_drift_finds_no_work_and_the_overlay_goes_on_and_off(tmp_path, version):
    is_next = version == PATCHSET.lock.next
    if is_next and not NEXT:
        pytest.skip("no git directory of upstream's main at hand: set NEXT to one")
    checkout = tmp_path / "checkout"
    fetch(PATCHSET.lock, REPOSITORY, checkout, version, NEXT and Path(NEXT) if is_next else None)
    original = snapshot(checkout)
    if version != PATCHSET.lock.pin:  # from which nothing has changed
        result = run("drift", checkout)
        left = [line for line in result.out if line.startswith("  body ")]
        are_all = f"upstream's names that our code uses: {len(left)} changed" in result.out
        assert result.code == 0 or (is_next and are_all), "\n".join(result.out)
    assert run("apply", checkout).code == 0
    done, *notices = run("apply", checkout).out
    assert done == "already applied"
    assert all("patch: only git checkouts have examples/" in notice for notice in notices)
    assert bool(notices) != is_next, "an sdist has no scripts"
    assert run("apply", checkout, "--revert").code == 0
    assert snapshot(checkout) == original
