# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Replacements of upstream's attributes at run time: what the source does, and what is declared."""

import pytest

from mini import write_tree
from overlay.rules import MOST_REPLACEMENTS as MOST
from overlay.rules import in_source

IMPORT = "from megatron.core import a\n"
NAME = "megatron.core.a.f"
FILE = "megatron_overlay/megatron/core/new/deep/module.py"
ENTRY = f'["{NAME}"]\nby = ["{FILE}"]\nWhy-Not-A-Hook = "none fits"\nDrop-When = "one does"\n'


@pytest.mark.parametrize(
    "source, expected",
    [
        (IMPORT + "a.f = None", {NAME}),
        (IMPORT + "kept, a.f = a.f, None", {NAME}),
        (IMPORT + "a.f += 1", {NAME}),
        (IMPORT + "del a.f", {NAME}),
        (IMPORT + "a.f['key'] = 1", {NAME}),
        ("import megatron.core.a\nmegatron.core.a.f = None", {NAME}),
        ("import megatron.core.a as b\ndef g():\n  b.f = None", {NAME}),
        ("from .. import a\na.f = None", {NAME}),
        (IMPORT + "a.C.method = None", {"megatron.core.a.C.method"}),
        (IMPORT + "setattr(a, 'f', None)", {NAME}),
        (IMPORT + "setattr(a, name, None)", {"megatron.core.a.*"}),
        (IMPORT + "with replaced(a, f=1, g=2): ...", {NAME, "megatron.core.a.g"}),
        (IMPORT + "with replaced(a, **them): ...", {"megatron.core.a.*"}),
        (IMPORT + "mock.patch.object(a, 'f')", {NAME}),
        ("mock.patch('megatron.core.a.f')", {NAME}),
        # objects, PyTorch, reading
        (IMPORT + "def g(x):\n  x.f = a.f\n  a.f(1)", set()),
        ("import torch\ntorch.compile = None", set()),
    ],
)
def test_what_a_file_replaces(source, expected):
    assert in_source(source, "megatron.core.new") == expected


@pytest.mark.parametrize(
    "declared, source, problem",
    [
        (ENTRY, IMPORT + "a.f = None", None),
        ("", "from megatron.core.new.deep import module\nmodule.f = None", None),  # ours
        ("", IMPORT + "a.f = None", f"{FILE} replaces {NAME}: not in patches/runtime.toml"),
        (ENTRY, "", f"patches/runtime.toml: {FILE} does not replace {NAME}"),
        (ENTRY.replace("one does", ""), IMPORT + "a.f = None",
         f"patches/runtime.toml: {NAME} has no Drop-When"),
    ],
)  # fmt: skip
def test_the_declaration_is_what_the_source_does(world, declared, source, problem):
    write_tree(world.root, {"patches/runtime.toml": declared, FILE: source})
    result = world.run("headers")
    assert result.errors == ([f"error: {problem}"] if problem else [])


def test_the_number_of_replacements_is_limited(world):
    names = [f"f{number}" for number in range(MOST + 1)]
    source = IMPORT + "".join(f"a.{name} = None\n" for name in names)
    declared = "".join(ENTRY.replace("a.f", f"a.{name}") for name in names)
    write_tree(world.root, {"patches/runtime.toml": declared, FILE: source})
    assert world.run("headers").errors == [
        f"error: patches/runtime.toml: {MOST + 1} replacements, over {MOST}"
    ]
