# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The lock, and canonical patches."""

import mini
from mini import HEADER, MODULE, REPLACED, SCRIPT, A, B, edit, numbered, snapshot
from overlay.patchset import Lock


def test_patches_become_canonical_and_then_stay_the_same_bytes(world):
    before = snapshot(world.root / "patches")
    world.apply()
    assert world.run("refresh", world.checkout).code == 0
    assert snapshot(world.root / "patches") == before
    wide = edit(A, "a_3", "A_three").replace("@@ -2,3 +2,3 @@", "@@ -1,5 +1,5 @@ heading")
    wide = wide.replace(" a_2\n", " a_1\n a_2\n")  # one line, where the hunk's counts say two
    world.patch("0001-first", wide + edit(B, "b_3", "B_three"), "\n" + HEADER)
    assert world.lock().out == ["wrote patches/0001-first.patch"]
    assert snapshot(world.root / "patches") == before
    next((world.root / "build/cache").glob("main-*")).unlink()  # its table stays as it is
    assert world.lock().out == ["patches and lock are up to date"]


def test_the_lock_has_every_version_that_has_a_file(world):
    world.add_version("9.0.0", mini.UPSTREAM | {MODULE: "theirs\n"})
    world.lock()
    files = Lock.read(world.root / "patches/upstream.toml").files
    assert list(files) == [mini.PIN, mini.LATER, "9.0.0"]
    having = [[v for v in files if path in files[v]] for path in (REPLACED, MODULE, SCRIPT)]
    assert having == [[*files], ["9.0.0"], [*files]]


def test_a_pristine_clone_gives_the_lock_its_git_only_files(world):
    changed = mini.CLONE | {SCRIPT: "s_0\n" + numbered("s")}
    world.as_tree(changed)
    assert world.apply().code == 4
    written = [f"wrote patches/{name}" for name in ("0009-script.patch", "upstream.toml")]
    assert world.run("refresh", world.checkout).out == written
    assert world.apply().code == 0
    assert world.text(SCRIPT) == "s_0\n" + numbered("s", {3: "S_three"})
