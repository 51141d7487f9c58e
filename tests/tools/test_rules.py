# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Headers and sizes of patches, and replacements of upstream's attributes at run time."""

import errno

import pytest

from mini import HEADER, edit, write_tree
from overlay.__main__ import reported
from overlay.rules import MOST_LINES, MOST_PATCHES, replaced_in

A = "megatron/core/a.py"
LARGE = edit(A, "a_3", "A").replace("+A\n", "+line\n" * 41).replace("+2,3", "+2,43")
HUGE = LARGE.replace("+line\n", "+line\n" * 12).replace("+2,43", f"+2,{41 * 12 + 2}")
WHY = HEADER.strip() + "\nWhy-Not-A-Hook: it is\n a test\n\n"


@pytest.mark.parametrize(
    "header, diff, problem",
    [
        (HEADER, edit(A, "a_3", "A"), None),
        (HEADER.strip() + "\nFeature: again\n\n", "", "unknown or repeated header line 'Feature'"),
        *((HEADER.replace(f"{line}\n", ""), "", f"no {line.partition(':')[0]} in the header")
          for line in HEADER.splitlines() if line),
        (HEADER.replace("pending", "submitted"), "", "Upstream-Status is 'submitted'"),
        (HEADER, LARGE, "42 changed lines (over 40), no Why-Not-A-Hook"),
        (WHY, LARGE, None),
        (WHY, HUGE, f"over {MOST_LINES}"),
    ],
)  # fmt: skip
def test_headers_and_sizes(world, header, diff, problem):
    world.patch("0001-first", diff or edit(A, "a_3", "A"), header)
    result = world.run("headers")
    assert result.code == bool(problem)
    assert (problem or "3 patch headers are in order") in "\n".join(result.errors + result.out)
    for number in range(MOST_PATCHES):
        world.patch(f"1{number:03}-more", edit(A, "a_3", "A"))
    assert f"over {MOST_PATCHES}" in "".join(world.run("headers").errors)


IMPORT = "from megatron.core import a\n"
NAME = "megatron.core.a.f"
FILE = "megatron_overlay/megatron/core/new/deep/module.py"
ENTRY = f'["{NAME}"]\nby = ["{FILE}"]\nWhy-Not-A-Hook = "none fits"\nDrop-When = "one does"\n'


@pytest.mark.parametrize(
    "source, expected",
    [
        (IMPORT + "kept, a.f = a.f, None", {NAME}),
        (IMPORT + "a.f['key'] = 1", {NAME}),
        ("from .. import a\na.f = None", {NAME}),
        (IMPORT + "setattr(a, 'f', None)", {NAME}),
        (IMPORT + "with replaced(a, f=1, g=2): ...", {NAME, "megatron.core.a.g"}),
        ("import torch\ntorch.compile = None", {"torch.compile"}),
        # functions and classes of objects
        ("class C: ...\ndef g(x):\n  x.__class__ = C", {"*.__class__"}),
        ("def g(x):\n  def f(): ...\n  x.step = f", {"*.step"}),
        ("def g(x):\n  x.fns[:] = [lambda: None]", {"*.fns"}),
        # data of objects, a configuration's functions, reading
        (IMPORT + "def g(x):\n  x.f = a.f\n  a.f(1)\n  x.sizes[0] = 1", set()),
        ("def g(x):\n  x.config.no_sync_func = partial(g, x)", set()),
        ("class C:\n  def g(self):\n    self.f = lambda: None", set()),
    ],
)
def test_what_a_file_replaces(source, expected):
    assert replaced_in(source, "megatron/core/new/m.py") == expected


ASSIGN = IMPORT + "a.f = None"


@pytest.mark.parametrize(
    "declared, source, problem",
    [
        (ENTRY, ASSIGN, None),
        ("", "from megatron.core.new.deep import module\nmodule.f = None", None),  # ours
        ("", ASSIGN, f"{FILE} replaces {NAME}: not in patches/runtime.toml"),
        (ENTRY, "", f"patches/runtime.toml: {FILE} does not replace {NAME}"),
        (ENTRY.replace("one does", ""), ASSIGN, f"patches/runtime.toml: {NAME} has no Drop-When"),
    ],
)  # fmt: skip
def test_the_declaration_is_what_the_source_does(world, declared, source, problem):
    write_tree(world.root, {"patches/runtime.toml": declared, FILE: source})
    result = world.run("headers")
    assert result.errors == ([f"error: {problem}"] if problem else [])


def test_an_error_without_a_file_has_no_name(capsys):
    """Errors of a broken pipe and of a refused lock name no file."""

    def main(_argv=None):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert reported(main)() == 1
    assert capsys.readouterr().err == "error: Broken pipe\n"
