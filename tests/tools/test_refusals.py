# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What apply refuses: the exit code, the files it names, and that nothing changes."""

import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from mini import HEADER, STATE, World, edit, snapshot
from overlay.checkout import sha256

ESCAPE = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1,1 +1,1 @@\n-secret\n+stolen\n"
NEW_LINK = (
    "diff --git a/megatron/evil b/megatron/evil\nnew file mode 120000\n"
    "--- /dev/null\n+++ b/megatron/evil\n@@ -0,0 +1 @@\n+../../outside\n"
    "\\ No newline at end of file\n"
)


def refused(world: World, code: int, *flags: str, naming: str) -> None:
    """Run apply; it must fail with ``code``, in lines that all are errors, and change nothing."""
    before = snapshot(world.base)
    result = world.apply(*flags)
    assert result.code == code, result
    assert all(line.startswith("error: ") for line in result.errors)
    assert naming in "\n".join(result.errors)
    assert snapshot(world.base) == before


@pytest.mark.parametrize("args", [(), ("x", "--check", "--revert"), ("x", "--no-such")])
def test_usage_errors_exit_2_in_one_line(world, args):
    result = world.run("apply", *args)
    assert (result.code, len(result.errors)) == (2, 1)


def test_a_folder_that_is_no_checkout_exits_3(world):
    (world.checkout / "megatron/core/package_info.py").unlink()
    refused(world, 3, naming="not a Megatron-LM checkout")


def test_a_wrong_version_exits_3_with_both_versions(world):
    info = world.checkout / "megatron/core/package_info.py"
    info.write_text(info.read_text().replace("3", "9"))
    refused(world, 3, naming="is Megatron-LM 1.2.9; this overlay needs 1.2.3")


@pytest.mark.parametrize("name", ["a.py", "replaced.py"])
def test_a_dirty_upstream_file_exits_4(world, name):
    (world.checkout / "megatron/core" / name).write_text("dirty\n")
    refused(world, 4, naming=f"megatron/core/{name} differs from the lock")
    refused(world, 4, "--check", naming=f"megatron/core/{name} differs from the lock")


def test_every_dirty_file_is_named(world):
    for name in ("a.py", "sub/b.py"):
        (world.checkout / "megatron/core" / name).write_text("dirty\n")
    refused(world, 4, naming="core/a.py")
    refused(world, 4, naming="core/sub/b.py")


def test_a_missing_upstream_file_exits_4(world):
    (world.checkout / "megatron/core/a.py").unlink()
    refused(world, 4, naming="megatron/core/a.py is missing")


def test_patched_files_without_their_originals_exit_4(world):
    world.apply()
    shutil.rmtree(world.checkout / STATE)
    refused(world, 4, naming="its original is lost")


@pytest.mark.parametrize("flag", [(), ("--revert",)])
@pytest.mark.parametrize("path", ["megatron/core/a.py", "examples/mimo/run.py"])
def test_local_edits_exit_5(world, flag, path):
    world.apply()
    (world.checkout / path).write_text("my work\n")
    if not flag:
        world.edit_patch_set()
    refused(world, 5, *flag, naming=path)


def test_a_foreign_file_at_an_overlay_path_exits_5(world):
    (world.checkout / "examples/mimo").mkdir(parents=True)
    (world.checkout / "examples/mimo/run.py").write_text("my work\n")
    refused(world, 5, naming="examples/mimo/run.py")


def test_a_folder_at_an_overlay_path_exits_5(world):
    (world.checkout / "examples/mimo/run.py").mkdir(parents=True)
    refused(world, 5, naming="examples/mimo/run.py")


def test_a_symlinked_folder_in_the_checkout_is_not_followed(world):
    outside = world.base / "outside"
    shutil.copytree(world.checkout / "megatron/core/sub", outside)
    shutil.rmtree(world.checkout / "megatron/core/sub")
    (world.checkout / "megatron/core/sub").symlink_to(outside)
    refused(world, 4, naming="megatron/core/sub is a symlink")


def test_a_folder_made_a_symlink_after_apply_is_not_followed(world):
    world.apply()
    outside = world.base / "outside"
    shutil.move(world.checkout / "examples", outside)
    (world.checkout / "examples").symlink_to(outside)
    refused(world, 4, "--revert", naming="examples is a symlink")


def test_a_symlinked_file_in_the_checkout_is_refused(world):
    target = world.base / "outside.py"
    shutil.move(world.checkout / "megatron/core/a.py", target)
    (world.checkout / "megatron/core/a.py").symlink_to(target)
    refused(world, 4, naming="megatron/core/a.py")


def test_a_symlinked_private_folder_is_refused(world):
    (world.base / "outside").mkdir()
    (world.checkout / STATE).symlink_to(world.base / "outside")
    refused(world, 1, naming=STATE)


@pytest.mark.parametrize("link", ["run.py", "folder"])
def test_a_symlink_among_the_overlay_files_is_refused(world, link):
    path = world.root / "examples/mimo" / link
    path.unlink(missing_ok=True)
    path.symlink_to("/etc")
    refused(world, 1, naming=f"examples/mimo/{link} is a symlink")


def test_an_overlay_file_cannot_land_in_a_private_folder(world):
    (world.root / "megatron_overlay/.git").mkdir()
    (world.root / "megatron_overlay/.git/config").write_text("x")
    refused(world, 1, naming=".git/config")


@pytest.mark.parametrize("path", ["../outside.txt", "/etc/hostname", "megatron/../../outside.txt"])
def test_a_lock_that_names_a_path_outside_is_refused(world, path):
    lock = world.root / "patches/upstream.toml"
    entry = f'[files."{path}"]\nbefore = "{sha256(b"secret")}"\nafter = "0"\nby = ["overlay"]\n'
    lock.write_text(lock.read_text() + entry)
    refused(world, 1, naming="leaves the checkout")


@pytest.mark.parametrize(
    "diff",
    [
        ESCAPE.format("../outside.txt"),
        ESCAPE.format("../../../outside.txt"),
        ESCAPE.format("megatron/../../outside.txt"),
        NEW_LINK + ESCAPE.format("megatron/evil/outside.txt"),
    ],
)
def test_a_patch_that_leaves_the_checkout_is_refused(world, diff):
    """Also by apply itself, where somebody made the lock to fit the patch."""
    (world.base / "outside.txt").write_text("secret\n")
    (world.base / "outside").mkdir()
    (world.base / "outside/outside.txt").write_text("secret\n")
    patch = world.patch("0003-evil", diff)
    assert world.run("lock", "--upstream", world.upstream).code == 1
    lock = world.root / "patches/upstream.toml"
    line = f'"0003-evil.patch" = "{sha256(patch.read_bytes())}"'
    lock.write_text(lock.read_text().replace("[patches]", f"[patches]\n{line}"))
    (world.root / "patches/series").write_text(
        "0003-evil.patch\n0001-first.patch\n0002-second.patch\n"
    )
    before = snapshot(world.base)
    result = world.apply()
    assert (result.code, len(result.errors)) == (1, 1)
    world.apply("--revert")
    assert snapshot(world.base) == before


def test_a_manifest_that_names_a_path_outside_is_refused(world):
    world.apply()
    victim = world.base / "victim"
    victim.write_text("precious")
    manifest = world.checkout / STATE / "applied.json"
    table = json.loads(manifest.read_text())
    after = {"sha256": sha256(b"precious"), "mode": 0o644}
    table["files"]["../victim"] = {"before": None, "after": after}
    manifest.write_text(json.dumps(table))
    refused(world, 1, "--revert", naming="'../victim'")


def test_a_damaged_original_is_not_put_back(world):
    world.apply()
    for blob in (world.checkout / STATE / "blobs").iterdir():
        blob.write_text("damaged")
    before = world.files()
    assert world.apply("--revert").errors[0].endswith("is missing or damaged: fetch anew")
    assert world.files() == before


@pytest.mark.parametrize("file", ["applied.json", "journal.json"])
def test_a_damaged_record_is_reported_in_one_line(world, file):
    world.apply()
    (world.checkout / STATE / file).write_text('{"files": 1}')
    refused(world, 1, naming=f"{file} is damaged")


def test_a_patch_set_edited_after_its_lock_is_refused(world):
    world.patch("0001-first", edit("megatron/core/a.py", "a 3", "another"), HEADER)
    refused(world, 1, naming="patches/0001-first.patch differs from the lock: run `make lock`")


@pytest.mark.parametrize("applied", [False, True], ids=["apply", "revert"])
def test_an_unwritable_folder_leaves_the_checkout_as_it_was(applied):
    """Run by a user who may write everything but one folder, whose turn comes late."""
    base = Path(tempfile.mkdtemp())
    try:
        base.chmod(0o755)
        world = World(base)
        if applied:
            world.apply()
        user = 65534 if os.geteuid() == 0 else os.geteuid()
        for path in [world.checkout, *world.checkout.rglob("*")]:
            os.chown(path, user, -1, follow_symlinks=False)
        (world.checkout / "megatron/core/sub").chmod(0o555)
        before = snapshot(world.checkout)
        code, errors = _as_user(user, world, ["--revert"] if applied else [])
        assert code == 1
        assert errors.splitlines() == [
            f"error: {world.checkout}/megatron/core/sub/b.py: Permission denied:"
            " the checkout is as before"
        ]
        assert snapshot(world.checkout) == before
    finally:
        shutil.rmtree(base)


def _as_user(user: int, world: World, flags: list[str]) -> tuple[int, str]:
    """Run apply in a child process as ``user``; its exit code and error output."""
    errors, pipe = os.pipe()
    child = os.fork()
    if child == 0:
        os.seteuid(user)
        result = world.apply(*flags)
        os.write(pipe, "\n".join(result.errors).encode())
        os._exit(result.code)
    os.close(pipe)
    with os.fdopen(errors) as stream:
        text = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def test_a_second_run_at_the_same_time_is_refused(world):
    descriptor = os.open(world.checkout, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        refused(world, 1, naming="another run is at work")
    finally:
        os.close(descriptor)
