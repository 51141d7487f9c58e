# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A command names what stands in its way, with its exit code, before anything changes."""

import fcntl
import json
import os
import shutil

import pytest

import mini
from mini import INFO, PIN, REPLACED, RUN, A, B, World, edit, snapshot, write_tree

JOURNAL = f"{mini.STATE}/applied.json"
DIFFERS = "differs from the lock, as git diff shows: restore it or fetch anew"
APPLY, CHECK, REVERT = "apply checkout", "apply checkout --check", "apply checkout --revert"
LOCK, FETCH = "refresh", "fetch new"
NEW_LINK = (
    "diff --git a/megatron/evil b/megatron/evil\nnew file mode 120000\n"
    "--- /dev/null\n+++ b/megatron/evil\n@@ -0,0 +1 @@\n+../../outside\n"
    "\\ No newline at end of file\n"
)
VICTIM = json.dumps({"../victim": [None, None, [None]]})


def write(files: dict[str, str]):
    return lambda world: write_tree(world.checkout, files)


def ours(files: dict[str, str]):
    return lambda world: write_tree(world.root, files)


def patch(name: str, diff: str):
    return lambda world: world.patch(name, diff)


def applied(arrange):
    return lambda world: (world.apply(), arrange(world))


def edited(path: str, old: str, new: str):
    return applied(lambda world: world.replace(path, old, new))


def link_out(path: str):
    """Move what is at a path out of the checkout, and put a symlink there."""

    def arrange(world: World) -> None:
        shutil.move(world.checkout / path, world.base / "outside")
        (world.checkout / path).symlink_to(world.base / "outside")

    return arrange


def in_lock(path: str):
    return lambda world: world.edit_lock(lambda text: f'{text}"{path}" = ["0", "0"]\n')


def add(files: dict[str, str], **how: str):
    return lambda world: world.add_version("9.0.0", files, **how)


def without_cache(world: World) -> None:
    shutil.rmtree(world.root / "build/cache")


def longer_sdist(world: World) -> None:
    with (world.root / f"build/cache/mini-{PIN}.tar.gz").open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("words, arrange, code, naming", [
    (APPLY, lambda w: (w.checkout / INFO).unlink(), 3, "not a Megatron-LM checkout"),
    (APPLY, write({INFO: mini.package_info("1.2.9")}), 3,
     "is Megatron-LM 1.2.9; this overlay needs 1.2.3 or 1.3.0"),
    (APPLY, write({A: "x", B: "x"}), 4, f"{A} {DIFFERS} + {B} {DIFFERS}"),
    (CHECK, write({REPLACED: "dirty\n"}), 4, f"{REPLACED} {DIFFERS}"),
    (APPLY, applied(lambda w: shutil.rmtree(w.checkout / mini.STATE)), 4, f"{A} {DIFFERS}"),
    (APPLY, link_out("megatron/core/sub"), 4, "megatron/core/sub/b.py lies behind a symlink"),
    (APPLY, write({RUN: "my work\n"}), 5, RUN),
    (APPLY, lambda w: (w.checkout / RUN).mkdir(parents=True), 5, RUN),
    (CHECK, edited(A, "A_three", "mine"), 5, f"{A} was edited + delete the file"),
    (APPLY, applied(link_out(mini.STATE)), 1, mini.STATE),
    (APPLY, lambda w: fcntl.flock(os.open(w.checkout, os.O_RDONLY), fcntl.LOCK_EX), 1,
     "another run is at work"),
    (APPLY, applied(write({JOURNAL: '{"files": 1}'})), 1, "applied.json is damaged"),
    (APPLY, applied(write({JOURNAL: VICTIM})), 1, "'../victim'"),
    (REVERT, edited(A, "A_three", "mine"), 5, f"{A} was edited + delete the file"),
    (f"{CHECK} --revert", lambda w: None, 2, "not allowed with"),
    # a patch set that is not in order
    (APPLY, lambda w: (w.root / "examples/mimo/x").symlink_to("/etc"), 1, "mimo/x is a symlink"),
    (APPLY, ours({"megatron_overlay/.git/config": "x"}), 1, ".git/config"),
    (APPLY, in_lock("/etc/hostname"), 1, "leaves the checkout"),
    (APPLY, in_lock("megatron/../../outside.txt"), 1, "leaves the checkout"),
    (APPLY, patch("0001-first", edit(A, "a_3", "x") + edit(B, "b_3", "x")), 1,
     f"{A} differs from the lock: run `make lock` + {B}"),
    (APPLY, patch("0000-evil", edit("megatron/../../outside.txt", "s_3", "x")), 1, "0000-evil"),
    (APPLY, patch("0000-evil", NEW_LINK), 1, "0000-evil"),
    ("refresh --check", ours({f"megatron_overlay/{REPLACED}": "x\n"}), 1,
     "patches/upstream.toml is stale: run `make lock`"),
    (LOCK, add({path: text for path, text in mini.UPSTREAM.items() if path != B}), 1,
     f"on 9.0.0: patches/0001-first.patch: does not apply: error: {B}: No such file"),
    (LOCK, patch("0003-ours", edit(REPLACED, "old_3", "x")), 1, "both an overlay file"),
    (LOCK, patch("0002-again", edit(A, "a_4", "x")), 1, "same number"),
    (LOCK, patch("third", ""), 1, "not named NNNN-topic.patch"),
    (LOCK, patch("0003-gone", f"diff --git a/{A} b/{A}\ndeleted file mode 100644\n"), 1, "0003-g"),
    (LOCK, patch("0003-clone", edit("examples/x.py", "s_3", "x")), 1,
     "refresh with a git checkout, which has examples/x.py"),
    (f"{FETCH} --version 9", lambda w: None, 3, f"the lock has {PIN} and 1.3.0, not 9"),
    (f"{FETCH} --version 9.0.0", add(mini.UPSTREAM, top="../"), 1, "refused to unpack"),
    (FETCH, longer_sdist, 4, "the lock wants"),
    (FETCH, without_cache, 1, "pip install failed"),
    (f"{FETCH} --version 1.3.0", without_cache, 3, "give a git directory that has it with --next"),
    (f"{FETCH} --next nowhere", without_cache, 1, "nowhere: No such file"),
])  # fmt: skip
def test_what_stands_in_the_way_is_named_and_nothing_changes(
    world, monkeypatch, words, arrange, code, naming
):
    monkeypatch.chdir(world.base)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": ".", "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    write_tree(world.base, {"outside.txt": "s_3\n", "victim": "precious"})
    arrange(world)
    before = snapshot(world.base)
    result = world.run(*words.split())
    assert result.code == code, result
    assert result.errors and all(line.startswith("error: ") for line in result.errors)
    assert all(part in "\n".join(result.errors) for part in naming.split(" + ")), result.errors
    after = snapshot(world.base)
    changed = {path for path in before.keys() | after if before.get(path) != after.get(path)}
    assert [path for path in changed if not path.startswith("ours/build")] == []
