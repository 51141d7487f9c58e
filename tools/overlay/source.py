# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Names that the source of a Python file uses, in full."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import resolve_name

_DOTTED = re.compile(r"megatron(\.\w+)+")
_IMPORT = (ast.Import, ast.ImportFrom)
OWN = {"self", "cls", "parser"}  # argparse's parsers are ours, or Megatron hands them to us
_SETTERS = ("setattr", "delattr", "object", "Replacement")  # called with owner, name; mock's object


@dataclass(frozen=True)
class Use:
    """A name that a file uses.

    name: in full; empty if the syntax does not tell it. node: the call or definition, if it is one.
    replaces: whether the file assigns or deletes it, or names it in a call of setattr, ``replaced``
    or mock's ``patch``; ``*`` then stands for a computed name, or for an object of others that the
    file gives a function or a class.
    """

    line: int
    name: str
    node: ast.AST | None = None
    replaces: bool = False


def module_name(path: str) -> str:
    return path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")


def prefixes(name: str) -> set[str]:
    """Return ``a``, ``a.b`` and ``a.b.c`` for ``a.b.c``."""
    parts = name.split(".")
    return {".".join(parts[: n + 1]) for n in range(len(parts))}


def uses(source: str | bytes, path: str) -> Iterator[Use]:
    """Yield the names that the file at ``path`` uses."""
    package = path.rpartition("/")[0].replace("/", ".")
    nodes = list(ast.walk(ast.parse(source)))
    imports = {node: dict(imported(node, package)) for node in nodes if isinstance(node, _IMPORT)}
    names = {name: full for each in imports.values() for name, full in each.items()}
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in nodes:
        line = getattr(node, "lineno", 0)
        if node in imports:
            yield from (Use(line, full.removesuffix(".*")) for full in imports[node].values())
        elif isinstance(node, ast.Attribute):
            yield Use(line, _dotted(node, names), replaces=not isinstance(node.ctx, ast.Load))
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield Use(line, _dotted(node.value, names), replaces=True)
        elif isinstance(node, ast.Constant) and _DOTTED.fullmatch(str(node.value)):
            yield Use(line, node.value)
        elif isinstance(node, ast.ClassDef):
            methods = [member for member in node.body if isinstance(member, ast.FunctionDef)]
            for owner in filter(None, (_dotted(base, names) for base in node.bases)):
                yield from (Use(one.lineno, f"{owner}.{one.name}", one) for one in methods)
        elif isinstance(node, ast.Call):
            yield Use(line, _dotted(node.func, names), node)
            yield from _by_call(node, _last_name(node.func), names)
        elif isinstance(node, ast.Assign):
            yield from _of_objects(node, names.keys() | OWN, defined)


def _by_call(node: ast.Call, called: str, names: dict[str, str]) -> Iterator[Use]:
    """Yield the names in the arguments of a call such as ``getattr(owner, "name")``."""
    owner = _dotted(node.args[0], names) if node.args else ""
    for argument in node.args[1:2]:
        name = str(argument.value) if isinstance(argument, ast.Constant) else "*"
        if name.isidentifier() or called in _SETTERS:
            yield Use(node.lineno, f"{owner}.{name}", replaces=called in _SETTERS)
    for keyword in node.keywords if called == "replaced" else ():
        yield Use(node.lineno, f"{owner}.{keyword.arg or '*'}", replaces=True)
    if called == "patch":
        yield Use(node.lineno, owner, replaces=True)


def _of_objects(node: ast.Assign, known: set[str], defined: set[str]) -> Iterator[Use]:
    """Yield the attributes of objects to which an assignment gives a function or class of the file,
    a lambda or a partial, or a list with one; not of objects with ``known`` names."""
    is_function = any(
        isinstance(value, ast.Lambda)
        or getattr(value, "id", "") in defined
        or getattr(getattr(value, "func", None), "id", "") == "partial"
        for value in getattr(node.value, "elts", [node.value])
    )
    for target in node.targets:
        owner = target.value if isinstance(target, ast.Subscript) else target
        if isinstance(owner, ast.Attribute) and (is_function or owner.attr == "__class__"):
            if re.match(r"\w*", ast.unparse(owner))[0] not in known:
                yield Use(node.lineno, f"*.{owner.attr}", replaces=True)


def imported(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Yield the names that an import statement in ``package`` binds, each with its full name."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield alias.asname or top, alias.name if alias.asname else top
    elif isinstance(node, ast.ImportFrom):
        module = resolve_name("." * node.level + (node.module or ""), package)
        for alias in node.names:
            yield alias.asname or alias.name, f"{module}.{alias.name}"


def _dotted(node: ast.AST, names: dict[str, str]) -> str:
    """Return the full name of ``a``, ``a.b`` or ``"a.b"``; empty for other expressions.

    names: full names by the file's own.
    """
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, names)
        return owner and f"{owner}.{node.attr}"
    if isinstance(node, ast.Constant):
        return str(node.value)
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def _last_name(expression: ast.expr) -> str:
    """Return ``c`` for ``a.b.c`` and for ``c``."""
    return getattr(expression, "attr", getattr(expression, "id", ""))
