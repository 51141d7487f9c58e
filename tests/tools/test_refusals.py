# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What stands in the way of a command is named, with its exit code, before anything changes."""

import fcntl
import json
import os
import shutil

import pytest

import mini
from mini import INFO, PIN, REPLACED, RUN, SCRIPT, SECOND, A, B, World, edit, snapshot, write_tree

JOURNAL = f"{mini.STATE}/applied.json"
DIFFERS = "differs from the lock, as git diff shows: restore it or fetch anew"
APPLY, CHECK, REVERT = "apply checkout", "apply checkout --check", "apply checkout --revert"
LOCK, TAKE, FETCH = "refresh", "refresh checkout", "fetch new"
NEW_LINK = (
    "diff --git a/megatron/evil b/megatron/evil\nnew file mode 120000\n"
    "--- /dev/null\n+++ b/megatron/evil\n@@ -0,0 +1 @@\n+../../outside\n"
    "\\ No newline at end of file\n"
)


def nothing(world: World) -> None:
    pass


def write(files: dict[str, str]):
    return lambda world: write_tree(world.checkout, files)


def ours(path: str, text: str):
    return lambda world: write_tree(world.root, {path: text})


def patch(name: str, diff: str):
    return lambda world: world.patch(name, diff)


def applied(arrange):
    return lambda world: (world.apply(), arrange(world))


def at_work(world: World) -> None:
    fcntl.flock(os.open(world.checkout, os.O_RDONLY), fcntl.LOCK_EX)


def edited(path: str, old: str, new: str):
    return applied(lambda world: world.replace(path, old, new))


def link_out(path: str):
    """Put a symlink at a path, to where its content went, outside the checkout."""

    def arrange(world: World) -> None:
        outside = world.base / "outside"
        if (world.checkout / path).exists():
            shutil.move(world.checkout / path, outside)
        else:
            outside.mkdir()
        (world.checkout / path).symlink_to(outside)

    return arrange


def in_lock(path: str):
    return lambda world: world.edit_lock(lambda text: f'{text}"{path}" = ["0", "0"]\n')


def in_journal(world: World) -> None:
    write_tree(world.base, {"victim": "precious"})
    table = json.loads(world.text(JOURNAL)) | {"../victim": [None, None, [None]]}
    write({JOURNAL: json.dumps(table)})(world)


def in_patch(path: str, before: str = ""):
    def arrange(world: World) -> None:
        write_tree(world.base, {"outside.txt": "s_3\n", "outside/outside.txt": "s_3\n"})
        world.patch("0000-evil", before + edit(path, "s_3", "stolen"))

    return arrange


def without_b(world: World) -> None:
    world.add_version("9.0.0", {path: text for path, text in mini.UPSTREAM.items() if path != B})


def without_cache(world: World) -> None:
    shutil.rmtree(world.root / "build/cache")


def longer_sdist(world: World) -> None:
    with (world.root / f"build/cache/mini-{PIN}.tar.gz").open("ab") as file:
        file.write(b"more")


APPLY_ROWS = [
    (lambda w: (w.checkout / INFO).unlink(), 3, "not a Megatron-LM checkout"),
    (write({INFO: mini.package_info("1.2.9")}), 3,
     "is Megatron-LM 1.2.9; this overlay needs 1.2.3 or 1.2.4 or 1.3.0"),
    (write({A: "x", B: "x"}), 4, f"{A} {DIFFERS} + {B} {DIFFERS}"),
    (write({REPLACED: "dirty\n"}), 4, f"{REPLACED} {DIFFERS}"),
    (write({SCRIPT: "dirty\n"}), 4, f"{SCRIPT} {DIFFERS}"),
    (lambda w: (w.checkout / A).unlink(), 4, f"{A} {DIFFERS}"),
    (applied(lambda w: shutil.rmtree(w.checkout / mini.STATE)), 4, f"{A} {DIFFERS}"),
    (link_out("megatron/core/sub"), 4, "megatron/core/sub is a symlink"),
    (link_out(A), 4, A),
    (write({RUN: "my work\n"}), 5, RUN),
    (lambda w: (w.checkout / RUN).mkdir(parents=True), 5, RUN),
    (edited(A, "A_three", "mine"), 5, f"{A} was edited + delete the file"),
    (applied(lambda w: (w.edit_patch_set(), write({RUN: "mine\n"})(w))), 5, f"{RUN} was edited"),
    (link_out(mini.STATE), 1, mini.STATE),
    (at_work, 1, "another run is at work"),
    (applied(write({JOURNAL: '{"files": 1}'})), 1, "applied.json is damaged"),
    (applied(in_journal), 1, "'../victim'"),
    # a patch set that is not in order
    (lambda w: (w.root / "examples/mimo/x").symlink_to("/etc"), 1, "examples/mimo/x is a symlink"),
    (ours("megatron_overlay/.git/config", "x"), 1, ".git/config"),
    (in_lock("/etc/hostname"), 1, "leaves the checkout"),
    (in_lock("megatron/../../outside.txt"), 1, "leaves the checkout"),
    (patch("0001-first", edit(A, "a_3", "x") + edit(B, "b_3", "x")), 1,
     f"{A} differs from the lock: run `make lock` + {B}"),
    (ours(f"megatron_overlay/{REPLACED}", "x\n"), 1, f"{REPLACED} differs from the lock: run"),
    (in_patch("megatron/../../outside.txt"), 1, "0000-evil"),
    (in_patch("megatron/evil/outside.txt", NEW_LINK), 1, "0000-evil"),
]  # fmt: skip
ROWS = [
    *((words, *row) for words in (APPLY, CHECK) for row in APPLY_ROWS),
    (REVERT, edited(A, "A_three", "mine"), 5, f"{A} was edited + delete the file"),
    (REVERT, applied(link_out("examples")), 4, "examples is a symlink"),
    (REVERT, applied(write({JOURNAL: "{"})), 1, "applied.json is damaged"),
    (REVERT, applied(in_journal), 1, "'../victim'"),
    ("apply", nothing, 2, "CHECKOUT"),
    (f"{CHECK} --revert", nothing, 2, "not allowed with"),
    ("refresh --check", ours(f"megatron_overlay/{REPLACED}", "x\n"), 1,
     "patches/upstream.toml is stale: run `make lock`"),
    (LOCK, without_b, 1, f"on 9.0.0: patches/0001-first.patch: upstream has no {B}"),
    (LOCK, patch("0003-none", edit("megatron/x.py", "a_3", "x")), 1, "upstream has no megatron/x"),
    (LOCK, patch("0003-ours", edit(REPLACED, "old_3", "x")), 1, "both an overlay file"),
    (LOCK, patch("0003-stale", edit(A, "a_3", "x")), 1, "does not apply"),
    (LOCK, patch("0002-again", edit(A, "a_4", "x")), 1, "same number"),
    (LOCK, patch("third", ""), 1, "not named NNNN-topic.patch"),
    (LOCK, patch("0003-new", f"diff --git a/{A} b/{A}\ndeleted file mode 100644\n"), 1, "0003-new"),
    (LOCK, patch("0003-both", edit(A, "a_5", "x") + edit(SCRIPT, "s_9", "x")), 1,
     f"upstream has no {SCRIPT}"),
    (LOCK, patch("0003-clone", edit("examples/x.py", "s_3", "x")), 1,
     "refresh with a git checkout, which has examples/x.py"),
    (TAKE, edited(A, "A_three", "x"), 1, "belongs to 0001-first.patch, 0002-second.patch: name"),
    (f"{TAKE} --into 0001:{A}", edited(A, "A_ten_", "x"), 1, "meets lines of patches after 0001"),
    (f"{TAKE} --into 0008:{A}", edited(A, "A_three", "x"), 1, "no patches/0008-*.patch"),
    (TAKE, edited(INFO, "'\n", "'\nhook()\n"), 1, "belongs to no patch"),
    (TAKE, applied(lambda w: w.edit_patch_set()), 1, "has not the present patches applied"),
    ("refresh --pin 9", nothing, 1, "the lock has no version 9: add it first"),
    ("fetch mine", lambda w: (w.base / "mine").mkdir(), 3, "is not a Megatron-LM checkout"),
    (f"fetch checkout --version {SECOND}", nothing, 3, f"this overlay needs {SECOND}"),
    (f"{FETCH} --version 9", nothing, 3, f"the lock has {PIN} and {SECOND} and 1.3.0, not 9"),
    (f"{FETCH} --version 9.0.0", lambda w: w.add_version("9.0.0", mini.UPSTREAM, top="../"), 1,
     "refused to unpack"),
    (FETCH, longer_sdist, 4, "the lock wants"),
    (FETCH, without_cache, 1, "pip install failed"),
    (f"{FETCH} --version 1.3.0", without_cache, 3, "give a git directory that has it with --next"),
    (f"{FETCH} --next nowhere", without_cache, 1, "git archive failed"),
    (f"{FETCH} --next {mini.REPOSITORY}", without_cache, 1, "git archive failed"),
]  # fmt: skip


@pytest.mark.parametrize("words, arrange, code, naming", ROWS)
def test_what_stands_in_the_way_is_named_and_nothing_changes(
    world, monkeypatch, words, arrange, code, naming
):
    monkeypatch.chdir(world.base)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": ".", "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    arrange(world)
    before = snapshot(world.base)
    result = world.run(*words.split())
    assert result.code == code, result
    assert result.errors and all(line.startswith("error: ") for line in result.errors)
    assert all(part in "\n".join(result.errors) for part in naming.split(" + ")), result.errors
    after = snapshot(world.base)
    changed = {path for path in before.keys() | after if before.get(path) != after.get(path)}
    assert [path for path in changed if not path.startswith("ours/build")] == []
