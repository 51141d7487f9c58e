# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Names in the source of a Python file, in full."""

import ast
from collections.abc import Iterator


def module_name(path: str) -> str:
    return path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")


def prefixes(name: str) -> set[str]:
    """Return ``a``, ``a.b`` and ``a.b.c`` for ``a.b.c``."""
    parts = name.split(".")
    return {".".join(parts[: n + 1]) for n in range(len(parts))}


def imports_of(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Yield the names that an import statement in ``package`` binds, each with its full name."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield alias.asname or top, alias.name if alias.asname else top
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        base = parts[: len(parts) + 1 - node.level] if node.level else []
        for alias in node.names:
            full = [*base, *([node.module] if node.module else []), alias.name]
            yield alias.asname or alias.name, ".".join(full)


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """Return the full name of ``a``, ``a.b`` or ``"a.b"``; empty for other expressions.

    names: full names by the file's own.
    """
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, names)
        return owner and f"{owner}.{node.attr}"
    if isinstance(node, ast.Constant):
        return str(node.value)
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def last_name(expression: ast.expr) -> str:
    """Return ``c`` for ``a.b.c`` and for ``a.b.c(…)``."""
    if isinstance(expression, ast.Call):
        return last_name(expression.func)
    return getattr(expression, "attr", getattr(expression, "id", ""))
