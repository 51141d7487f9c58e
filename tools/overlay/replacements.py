# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Attributes of upstream's that our code replaces at run time, as declared and in the source."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from overlay.names import imports_of, last_name
from overlay.patchset import PatchSet
from overlay.uses import module_name

DECLARED = "patches/runtime.toml"
MOST = 9  # limit of the whole set
_FIELDS = ("by", "Why-Not-A-Hook", "Drop-When")
_SETTERS = ("setattr", "delattr", "object", "Replacement")  # called with owner, name; mock's object
_BESIDE = "tools/checkpoint"  # product code that is not in the overlay


def declared(root: Path) -> dict[str, dict]:
    """Return the declared replacements by upstream's dotted name; none without the file."""
    path = root / DECLARED
    return tomllib.loads(path.read_text()) if path.exists() else {}


def problems(patchset: PatchSet) -> list[str]:
    """Return the errors in the declaration: missing fields, and differences from the source."""
    known, found = declared(patchset.root), set(_in_product(patchset))
    lines = [
        f"{DECLARED}: {name} has no {field}"
        for name, entry in known.items()
        for field in _FIELDS
        if not entry.get(field)
    ]
    listed = {(name, path) for name, entry in known.items() for path in entry.get("by", [])}
    lines += [f"{path} replaces {name}: not in {DECLARED}" for name, path in sorted(found - listed)]
    lines += [
        f"{DECLARED}: {path} does not replace {name}" for name, path in sorted(listed - found)
    ]
    if len(known) > MOST:
        lines.append(f"{DECLARED}: {len(known)} replacements, over {MOST}")
    return lines


def _in_product(patchset: PatchSet) -> Iterator[tuple[str, str]]:
    """Yield each replacement of upstream's in product code: upstream's name, path of our file."""
    ours = {module_name(path) for path in patchset.overlay}
    sources = {source.path: path for path, source in patchset.overlay.items()}
    sources |= {path: "" for path in (patchset.root / _BESIDE).rglob("*.py")}
    for source, path in sources.items():
        if source.suffix == ".py":
            package = ".".join(Path(path).parts[:-1])
            for name in in_source(source.read_text(), package):
                parts = name.split(".")
                prefixes = {".".join(parts[:n]) for n in range(1, len(parts))}
                if not prefixes & ours:
                    yield name, source.relative_to(patchset.root).as_posix()


def in_source(text: str, package: str = "") -> set[str]:
    """Return the attributes below ``megatron`` that a file sets; ``*`` stands for a computed name.

    Set means assigned, deleted, or named in a call of setattr, ``replaced`` or mock's ``patch``.
    """
    tree = ast.parse(text)
    names = {
        name: f"{target}.{of}" if of else target
        for node in ast.walk(tree)
        for name, target, of in imports_of(node, package)
    }
    found = {f"{_dotted(owner, names)}.{name}" for owner, name in _set(tree)}
    return {name.removesuffix(".") for name in found if name.startswith("megatron.")}


def _set(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Yield the owner and the name of each attribute that may be set."""
    for node in ast.walk(tree):
        if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
            if isinstance(node, ast.Attribute):
                yield node.value, node.attr
            elif isinstance(node, ast.Subscript):
                yield node.value, ""
        elif isinstance(node, ast.Call) and node.args:
            called, (owner, *rest) = last_name(node), node.args
            if called == "replaced":
                yield from ((owner, keyword.arg or "*") for keyword in node.keywords)
            elif called == "patch":
                yield owner, ""
            elif called in _SETTERS and rest:
                yield owner, rest[0].value if isinstance(rest[0], ast.Constant) else "*"


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """Return the dotted name of an expression, with imported names in full; empty for others."""
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, names)
        return owner and f"{owner}.{node.attr}"
    if isinstance(node, ast.Constant):
        return str(node.value)
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""
