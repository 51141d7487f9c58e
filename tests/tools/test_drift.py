# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Drift's report on another upstream: patches, overlay files, and the names that we use."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import mini
from mini import REPLACED, UPSTREAM, A, B, numbered, snapshot, write_tree
from overlay.names import Version, compare

MODULE, OURS, NEW = "megatron/core/m.py", "megatron/core/ours.py", mini.MODULE
IMPORT = "from megatron.core.m import f, C\n"
HOOK = IMPORT + "C.hook = None"  # replaced at run time
PIN = """
from dataclasses import dataclass
LIMIT = 3
def f(a, b=1, *, key=None): ...
class Base:
    def inherited(self, n): ...
class C(Base):
    kind: int = 0
    def __init__(self, size, **more):
        self._queue = []
    def method(self, a, flag=False): ...
    def hook(self, a): ...
@dataclass
class Fields:
    one: int
@dataclass
class More(Fields):
    two: int = 2
"""
DERIVED = IMPORT + "class D(C):\n  def method(self, a, flag=False): ..."
TAKES_ALL = IMPORT + "class D(C):\n  def __init__(self, *args, **kwargs): ..."
GONE, CALL = "gone: megatron.core.m", "signature: megatron.core.m"
BODY = "body: megatron.core.m.C.{} changed upstream, and overridden or replaced by ours"


def findings(ours: str, new: dict[str, str | None]) -> list[str]:
    before, versions = {MODULE: PIN, "megatron/core/__init__.py": ""}, []
    for files in (before, before | new):
        with TemporaryDirectory() as folder:
            present = {path: text for path, text in files.items() if text is not None}
            versions.append(Version(write_tree(Path(folder), present)))
    found = compare({OURS: ours.encode()}, *versions)
    return sorted(f"{kind}: {name} {detail}".strip() for kind, name, detail in found)


@pytest.mark.parametrize(
    "row",
    [
        # names that are gone: reached through a module, a class, a base, a string
        ("import megatron.core.m as m\nm.LIMIT", "LIMIT", "MOST", f"{GONE}.LIMIT"),
        (IMPORT + "C.inherited", "inherited", "x", f"{GONE}.Base.inherited"),
        ("p('megatron.core.m.LIMIT', 1)", "LIMIT", "X", f"{GONE}.LIMIT"),
        (DERIVED, "def method", "def x", f"{GONE}.C.method"),
        # calls
        (IMPORT + "f(1, key=2)", "key=None", "name=None",
         f"{CALL}.f got an unexpected keyword argument 'key'; now (a, b=…, *, name=…)"),
        (IMPORT + "f(1, 2)", "a, b=1", "b, a=1",
         f"{CALL}.f passes a where b is now, passes b where a is now; now (b, a=…, *, key=…)"),
        ("from megatron.core.m import More\nMore(1, two=2)", "two:", "zwei:",
         f"{CALL}.More got an unexpected keyword argument 'two'; now (one, zwei=…)"),
        # what our code overrides, and replaces at run time: its signature, and its body
        (DERIVED, "flag", "flags", BODY.format("method"), f"{CALL}.C.method overridden or replaced "
         "by ours; was (a, flag=…), now (a, flags=…)"),
        (HOOK, "hook(self, a): ...", "hook(self, a): return a", BODY.format("hook")),
        (TAKES_ALL, "size, **more", "length, **more", BODY.format("__init__")),
        # no work: names that we do not use, and calls that still fit
        (DERIVED, "inherited(self, n): ...", "inherited(self, n): return n"),
        (IMPORT + "f(1, key=2)", "b=1", "b=1, c=2"),
        (IMPORT + "C(1).method(2)", "method", "x"),  # of an object: the tests see it
    ],
)  # fmt: skip
def test_names(row):
    ours, old, new, *expected = row
    assert old in PIN
    assert findings(ours, {}) == []
    assert findings(ours, {MODULE: PIN.replace(old, new)}) == expected


def test_modules_may_go_and_names_are_followed_through_re_exports():
    assert findings(IMPORT + "f(1)", {MODULE: None}) == [GONE]
    package = {
        MODULE: None,
        "megatron/core/m/__init__.py": "from .inner import *\nfrom megatron.core.m.inner import f",
        "megatron/core/m/inner.py": PIN,
    }
    assert findings(IMPORT + "f(1, key=2)\nC.method", package) == []


LANDED = {B: UPSTREAM[B].replace("b_3", "B_three")}


@pytest.mark.parametrize(
    "files, name, state, code",
    [
        ({}, "0001-first.patch", "applies", 0),
        ({}, "0009-script.patch", "left out", 0),
        (mini.LATER_UPSTREAM, "next/0002-second.patch", "applies", 0),  # the one of its own
        (LANDED, "0001-first.patch", "conflicts", 1),
        (LANDED | {A: numbered("a", {3: "A_three"})}, "0001-first.patch", "already there", 1),
        ({REPLACED: "new = 1\n"}, REPLACED, "changed upstream", 1),
        ({NEW: "def shard(a): ...\n"}, NEW, "new upstream", 1),
    ],
)
def test_each_patch_and_file_has_its_state(world, files, name, state, code):
    tree = write_tree(world.base / "other", UPSTREAM | files)
    before = snapshot(world.base)
    result = world.run("drift", tree)
    assert snapshot(world.base) == before
    assert [line for line in result.out if line.split() == [*state.split(), name]], result.out
    assert result.code == code


def test_an_applied_tree_and_no_tree_are_refused(world):
    world.apply()
    assert world.run("drift", world.checkout).code == 4
    assert world.run("drift", world.root).code == 3
