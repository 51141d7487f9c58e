# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Keep in ``patches/next/names.txt`` what the next version declares otherwise than the pin.

With this file, drift needs no tree of the next version. A line is a module that was compared; a
name that is gone; a function or class with its parameters there; or, after ``!``, a function that
our code overrides or replaces, or a patch changes, and whose body is another there.
"""

import inspect
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

from overlay.names import DEFAULT, Finding, Version, upstream_modules
from overlay.source import prefixes

NAMES, READ = "patches/next/names.txt", "patches/next/read.toml"
_TITLE = "# Made by `tools/overlay drift TREE --keep`: how the next version differs from the pin.\n"


def lines(ours: dict[str, bytes], pin: Version, other: Version, found: Collection[Finding]) -> str:
    """Return the file's text.

    ours: our files; found: what the comparison of both versions has found.
    """
    modules = upstream_modules(ours, pin)
    made = [f"module {name}" for name in modules]
    made += [f"! {name}" for name in {name for kind, name, _ in found if kind == "body"}]
    names = {name for module in modules for name in pin.members(module)}
    for name in names:
        if other.find(name) is None:
            made += [name] * all(map(other.find, prefixes(name) - {name}))
        elif (now := other.signature(name)) is not None and str(now) != str(pin.signature(name)):
            made.append(f"{name}{now}")
    return _TITLE + "\n".join(sorted(made)) + "\n"


class Kept(Version):
    """The next version, as the pin and the kept differences tell it."""

    def __init__(self, text: str, pin: Version):
        rows = [row for row in text.splitlines() if not row.startswith("#")]
        self._pin = pin
        self.modules = {row.partition(" ")[2] for row in rows if row.startswith("module ")}
        self._bodies = {row[2:] for row in rows if row.startswith("! ")}
        names = [row.partition("(") for row in rows if row.startswith("megatron.")]
        self._gone = {name for name, bracket, _ in names if not bracket}
        self._now = {name: _signature(rest) for name, bracket, rest in names if bracket}

    def find(self, name: str):
        found = self._pin.find(name)
        gone = self._gone & (prefixes(name) | prefixes(found.path if found else name))
        return None if gone else found

    def signature(self, name: str) -> inspect.Signature | None:
        found = self.find(name)
        return self._now.get(found.path if found else "", self._pin.signature(name))

    def body(self, name: str) -> str | None:
        found = self.find(name)
        return "changed" if found and found.path in self._bodies else self._pin.body(name)


def _signature(text: str) -> inspect.Signature:
    """Return the signature of ``a, b=…)``."""
    made = inspect.signature(eval(f"lambda {text.removesuffix(')').replace('…', '0')}: 0"))
    parameters = [
        one if one.default is one.empty else one.replace(default=DEFAULT)
        for one in made.parameters.values()
    ]
    return made.replace(parameters=parameters)


def read(root: Path) -> dict[str, str]:
    """Return what the changed functions mean for us, by name."""
    path = root / READ
    return tomllib.loads(path.read_text()) if path.is_file() else {}


def unread(root: Path, found: Collection[Finding]) -> Iterator[str]:
    """Yield the changed bodies that are not in the list of those that were read, and its entries
    that nothing needs."""
    notes = read(root)
    bodies = {name for kind, name, _ in found if kind == "body"}
    yield from (f"{name} has changed upstream: read it, note it in {READ}"
                for name in sorted(bodies - notes.keys()))  # fmt: skip
    yield from (f"{READ}: {name} has not changed" for name in sorted(notes.keys() - bodies))
    yield from (f"{READ}: {name} has no note" for name, note in notes.items() if not note)
