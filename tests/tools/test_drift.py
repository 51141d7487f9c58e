# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Drift's report on another upstream: patches, overlay files, and the names that we use."""

import json

import pytest

from mini import SECOND_UPSTREAM, UPSTREAM, numbered, snapshot, write_tree
from overlay.names import Tree
from overlay.uses import Uses

MODULE, OURS = "megatron/core/m.py", "megatron/core/ours.py"
REPLACED, NEW = "megatron/core/replaced.py", "megatron/core/new/deep/module.py"
IMPORT = "from megatron.core.m import f, C\n"
PIN = """
LIMIT = 3
def f(a, b=1, *, key=None): ...
def g(x) -> "C": ...
class Base:
    def inherited(self, n): ...
class C(Base):
    kind: int = 0
    def __init__(self, size, **more):
        self._queue = []
        self.child: Base = Base()
    def method(self, a, flag=False): ...
    @property
    def other(self) -> Base: ...
"""


def findings(ours: str, new: dict[str, str | None], old: dict[str, str] | None = None) -> list[str]:
    before = {MODULE: PIN} | (old or {})
    after = {path: text for path, text in (before | new).items() if text is not None}
    pin, other, mine = (
        {path: text.encode() for path, text in files.items()}
        for files in (before, after, {OURS: ours})
    )
    found = Uses(mine, Tree(pin | mine), Tree(other | mine)).found
    return sorted(f"{kind}: {name} {detail}".strip() for kind, name, detail in found)


@pytest.mark.parametrize(
    "ours, old, new, expected",
    [
        # names that are gone: imported, reached through a module, a class, an object, a string
        (IMPORT, "def f(", "def f2(", "gone: megatron.core.m.f"),
        ("import megatron.core.m as m\nm.LIMIT", "LIMIT", "MOST", "gone: megatron.core.m.LIMIT"),
        ("import megatron.core.m\nmegatron.core.m.LIMIT", "LIMIT", "X",
         "gone: megatron.core.m.LIMIT"),
        ("from megatron.core import m\nm.C.method", "method", "x",
         "gone: megatron.core.m.C.method"),
        (IMPORT + "C(1)._queue", "_queue", "_q", "gone: megatron.core.m.C._queue"),
        (IMPORT + "def h(c: C | None):\n  c.child.inherited(1)", "inherited", "x",
         "gone: megatron.core.m.Base.inherited"),
        (IMPORT + "def h(c: 'C'):\n  c.kind = 1", "kind", "sort", "gone: megatron.core.m.C.kind"),
        (IMPORT + "def h(c: C):\n  x = c.other\n  x.inherited(2)", "inherited", "x",
         "gone: megatron.core.m.Base.inherited"),
        ("from megatron.core.m import g\ng(1).method(2)", "def method", "def x",
         "gone: megatron.core.m.C.method"),
        ("def patched(p):\n  p('megatron.core.m.LIMIT', 1)", "LIMIT", "X",
         "gone: megatron.core.m.LIMIT"),
        (IMPORT + "setattr(C, 'method', 1)", "def method", "def x",
         "gone: megatron.core.m.C.method"),
        # a name of an object whose class is unknown
        (IMPORT + "def h(c):\n  return c._queue", "_queue", "_q",
         "perhaps gone: megatron.core.m.C._queue"),
        (IMPORT + "from megatron.core.m import Base\ndef h(b: Base):\n  return b._queue", "_queue",
         "_q", "perhaps gone: megatron.core.m.C._queue"),
        # overrides and inheritance
        (IMPORT + "class D(C):\n  def method(self, a, flag=False): ...", "def method", "def x",
         "gone: megatron.core.m.C.method overridden by ours"),
        (IMPORT + "class D(C):\n  def method(self, a, flag=False): ...", "flag", "flags",
         "signature: megatron.core.m.C.method overridden by ours; was (a, flag=), now (a, flags=)"),
        (IMPORT + "class D(C):\n  def go(self):\n    self._queue", "_queue", "_q",
         "gone: megatron.core.m.C._queue"),
        (IMPORT + "class D(C):\n  def go(self):\n    super().inherited(1)", "inherited", "x",
         "gone: megatron.core.m.Base.inherited"),
        # calls
        (IMPORT + "f(1, key=2)", "key=None", "name=None",
         "signature: megatron.core.m.f no argument key; now (a, b=, name=)"),
        (IMPORT + "f(1)", "b=1", "b", "signature: megatron.core.m.f needs b; now (a, b, key=)"),
        (IMPORT + "f(1, 2)", "a, b=1", "b, a=1",
         "signature: megatron.core.m.f passes a where b is now, b where a is now; "
         "now (b, a=, key=)"),
        (IMPORT + "f(1, 2)", ", b=1", "",
         "signature: megatron.core.m.f takes 1 positional arguments, 2 are passed; now (a, key=)"),
        (IMPORT + "C(1).method(1, flag=True)", ", flag=False", "",
         "signature: megatron.core.m.C.method no argument flag; now (a)"),
        (IMPORT + "def h(c):\n  c.method(1, flag=True)", ", flag=False", "",
         "perhaps signature: megatron.core.m.C.method no argument flag; now (a)"),
        (IMPORT + "C(size=1)", "size", "length",
         "signature: megatron.core.m.C needs length; now (length, **kwargs)"),
        # no work: names that we do not use, that still fit, or that are ours
        (IMPORT + "f(1, key=2)", "b=1", "b=1, c=2", None),
        (IMPORT + "C(1, anything=2)", "def g(", "def gg(", None),
        (IMPORT + "class D(C):\n  def method(self, a, flag=False): ...\nD(1).method(2)",
         "kind", "sort", None),
        ("class K:\n  _queue = 1\n" + IMPORT + "def h(k):\n  k._queue", "_queue", "_q", None),
    ],
)  # fmt: skip
def test_names(ours, old, new, expected):
    assert old in PIN
    assert findings(ours, {}) == []
    assert findings(ours, {MODULE: PIN.replace(old, new)}) == ([expected] if expected else [])


def test_a_module_that_is_gone_is_named_once():
    assert findings(IMPORT + "f(1)", {MODULE: None}) == ["gone: megatron.core.m"]


def test_a_module_that_became_a_package_keeps_its_names():
    package = {
        MODULE: None,
        "megatron/core/m/__init__.py": "from .inner import *\nfrom megatron.core.m.inner import f",
        "megatron/core/m/inner.py": PIN,
    }
    assert findings(IMPORT + "f(1, key=2)\nC(1)._queue", package) == []
    package["megatron/core/m/inner.py"] = PIN.replace("_queue", "_q")
    assert findings(IMPORT + "C(1)._queue", package) == ["gone: megatron.core.m.C._queue"]


def test_a_name_is_followed_to_where_it_is_defined():
    old = {
        "megatron/core/__init__.py": "from .m import f",
        "megatron/core/other.py": "def f(a): ...",
    }
    new = {"megatron/core/__init__.py": "from .other import f"}
    ours = "from megatron import core\ncore.f(1, key=2)"
    assert findings(ours, new, old) == ["signature: megatron.core.m.f no argument key; now (a)"]
    assert findings(ours, {"megatron/core/__init__.py": ""}, old) == ["gone: megatron.core.m.f"]


def test_the_fields_of_dataclasses_are_arguments():
    source = "@dataclass\nclass Base:\n  a: int\n@dataclass\nclass C(Base):\n  b: int = 1\n"
    ours = "from megatron.core.d import C\nC(a=1, b=2)\nreplace(C(1), b=3)"
    new = {"megatron/core/d.py": source.replace("b:", "c:")}
    assert findings(ours, new, {"megatron/core/d.py": source}) == [
        "gone: megatron.core.d.C.b",
        "signature: megatron.core.d.C no argument b; now (a, c=)",
    ]


@pytest.mark.parametrize(
    "old, new, expected",
    [
        ("def method(", "def other_method(", "gone: megatron.core.m.C.method "),
        ("a, flag=False", "a", "signature: megatron.core.m.C.method replaced by ours; "
         "was (a, flag=), now (a)"),
        ("def inherited", "def other_name", None),
    ],
)  # fmt: skip
def test_a_function_replaced_at_run_time_is_compared(old, new, expected):
    pin, other = (Tree({MODULE: text.encode()}) for text in (PIN, PIN.replace(old, new)))
    uses = Uses({}, pin, other)
    uses.check_replaced(["megatron.core.m.C.method"], "patches/runtime.toml")
    found = [f"{kind}: {name} {detail}" for kind, name, detail in uses.found]
    assert found == ([expected] if expected else [])


@pytest.fixture
def drift(world):
    def drift(files: dict[str, str], *flags: str):
        tree = write_tree(world.base / "other", files)
        before = snapshot(world.base)
        result = world.run("drift", tree, *flags)
        assert snapshot(world.base) == before
        return result

    return drift


@pytest.mark.parametrize("files", [UPSTREAM, SECOND_UPSTREAM])
def test_a_version_that_all_patches_fit_is_no_work(drift, files):
    result = drift(files)
    assert (result.code, result.errors) == (0, [])
    offset = "applies with offset" if files is SECOND_UPSTREAM else "applies "
    assert any(line.startswith(f"  {offset}") for line in result.out)


CHANGED = {"megatron/core/a.py": UPSTREAM["megatron/core/a.py"].replace("a_10", "a_ten")}
LANDED = {"megatron/core/sub/b.py": UPSTREAM["megatron/core/sub/b.py"].replace("b_3", "B_three")}


@pytest.mark.parametrize(
    "files, name, state",
    [
        (CHANGED, "0001-first.patch", "applies"),
        (CHANGED, "0002-second.patch", "conflicts"),
        (LANDED, "0001-first.patch", "merges"),
        (LANDED | {"megatron/core/a.py": numbered("a", {3: "A_three"})}, "0001-first.patch",
         "already there"),
        ({"megatron/core/a.py": None}, "0001-first.patch", "conflicts"),
        ({"megatron/core/replaced.py": "new = 1\n"}, REPLACED, "changed upstream"),
        ({"megatron/core/replaced.py": None}, REPLACED, "gone upstream"),
        ({NEW: "theirs = 1\n"}, NEW, "new upstream"),
    ],
)  # fmt: skip
def test_each_patch_and_file_has_its_state(drift, files, name, state):
    tree = {path: text for path, text in (UPSTREAM | files).items() if text is not None}
    result = drift(tree, "--json")
    report = json.loads("\n".join(result.out))
    states = {row["name"]: row["state"] for row in report["patches"] + report["files"]}
    assert (result.code, states[name]) == (1, state)
    assert f"  {state} " in "\n".join(drift(tree).out)


def test_what_upstream_changed_in_a_replaced_file_is_listed(drift):
    result = drift(UPSTREAM | {NEW: "def shard(a): ...\n"})
    assert "new: megatron.core.new.deep.module.shard" in "\n".join(result.out)


def test_an_applied_tree_and_no_tree_are_refused(world):
    world.apply()
    assert world.run("drift", world.checkout).code == 4
    assert world.run("drift", world.root).code == 3
