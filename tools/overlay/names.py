# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Names and signatures in a tree of Python files, from the syntax alone: nothing is imported.

Modules are parsed when they are first needed. Names are followed through re-exports, relative
imports, base classes and annotations. A name that cannot be resolved is ``UNKNOWN``, one of another
package is ``EXTERNAL``, and one that is missing in the tree is ``None``.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from overlay.checkout import parents
from overlay.signature import Signature

UNKNOWN, EXTERNAL = object(), object()
# Decorators that leave the signature as it is.
_PLAIN_DECORATORS = set(
    "staticmethod classmethod abstractmethod override no_grad inference_mode jit_fuser "
    "deprecate_inference_params experimental_fn wraps lru_cache cache".split()
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


_parsed = cache(ast.parse)  # most files are the same in both trees


@dataclass(eq=False)
class Definition:
    """A module, class, function or value. ``node`` is None for a value."""

    module: "Module"
    name: str
    node: ast.AST | None = None
    owner: "Definition | None" = None  # the class of a member
    type_name: ast.expr | None = None  # the annotation of a value

    @property
    def label(self) -> str:
        return ".".join([self.module.name, *([self.owner.name] if self.owner else []), self.name])

    @cached_property
    def members(self) -> dict[str, "Definition"]:
        """Members that the class itself defines, including attributes that methods set on self."""
        found: dict[str, Definition] = {}
        for name, node, annotation in _bindings(self.node.body):
            found[name] = Definition(self.module, name, node, self, annotation)
        for method in [m.node for m in list(found.values()) if isinstance(m.node, _FUNCTIONS)]:
            receiver = method.args.args[0].arg if method.args.args else None
            hints = {a.arg: a.annotation for a in method.args.args + method.args.kwonlyargs}
            for node in ast.walk(method):
                for name, annotation in _set_on(receiver, node, hints):
                    known = found.setdefault(name, Definition(self.module, name, None, self))
                    known.type_name = known.type_name or annotation
        return found


class Module:
    """One file, with the bindings of its names."""

    def __init__(self, name: str, path: str, tree: ast.Module):
        self.name, self.path, self.tree = name, path, tree
        self.package = name if path.endswith("/__init__.py") else name.rpartition(".")[0]
        self.names: dict[str, Definition] = {}
        self.imports: dict[str, tuple[str, str | None]] = {}  # name -> module, name there
        self.stars: list[str] = []
        for name, node, annotation in _bindings(tree.body):
            self.names[name] = Definition(self, name, node, type_name=annotation)
        for node in _statements(tree.body):
            for name, target, of in imports_of(node, self.package):
                if name == "*":
                    self.stars.append(target)
                else:
                    self.imports.setdefault(name, (target, of))


@dataclass(frozen=True)
class Instance:
    """An object of a class; with ``inherited``, as ``super()`` sees it."""

    of: Definition
    inherited: bool = False


class Tree:
    """The modules in ``files`` (path to source)."""

    def __init__(self, files: dict[str, bytes]):
        self.files = files
        self._modules: dict[str, Module | None] = {}
        self._folders = {parent for path in files for parent in parents(path)}

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            base = name.replace(".", "/")
            self._modules[name] = None
            if base in self._folders:
                self._modules[name] = Module(name, f"{base}/__init__.py", ast.Module([], []))
            for path in (f"{base}.py", f"{base}/__init__.py"):
                if path in self.files:
                    self._modules[name] = Module(name, path, _parsed(self.files[path]))
        return self._modules[name]

    def follow(self, module: str, *chain: str):
        """Resolve a chain of names that starts with ``module``."""
        found = self.module(module)
        for name in chain:
            found = self.member(found, name)
        return found

    def member(self, of, name: str):
        """Resolve one name of a module, class, object, or value of a known class."""
        if isinstance(of, Module):
            return self._in_module(of, name, frozenset())
        if isinstance(of, Instance):
            return self._in_class(of.of, name, of.inherited)
        if isinstance(of, Definition):
            if isinstance(of.node, ast.ClassDef):
                return self._in_class(of, name, False)
            return self.member(self.value_of(of), name)
        return of

    def _in_module(self, of: Module, name: str, seen: frozenset):
        if (of.name, name) in seen:
            return UNKNOWN
        seen |= {(of.name, name)}
        if name in of.names and (of.names[name].node or name not in of.imports):
            return of.names[name]
        if name in of.imports:
            target, below = of.imports[name]
            source = self.module(target)
            if source is None:
                return None if target.split(".")[0] in self._folders else EXTERNAL
            return self._in_module(source, below, seen) if below else source
        for star in of.stars:
            source = self.module(star)
            found = self._in_module(source, name, seen) if source else UNKNOWN
            if found is not None:
                return found
        return self.module(f"{of.name}.{name}")

    def _in_class(self, of: Definition, name: str, inherited: bool):
        for base in list(self.bases(of))[int(inherited) :]:
            if base is not UNKNOWN and name in base.members:
                return base.members[name]
        return None

    def bases(self, of: Definition, seen: frozenset = frozenset()) -> Iterator:
        """Yield the class and its bases, nearest first; UNKNOWN for a base outside the tree."""
        yield of
        for expression in of.node.bases:
            base = self.evaluate(of.module, expression)
            if is_class(base) and id(base.node) not in seen:
                yield from self.bases(base, seen | {id(base.node)})
            else:
                yield UNKNOWN

    def value_of(self, of: Definition):
        """Return the object that a value, a property, or a call of a function gives."""
        annotation = getattr(of.node, "returns", of.type_name)
        return self.instance_of(of.module, annotation)

    def evaluate(self, module: Module, expression: ast.expr):
        """Return the definition that a dotted name has in ``module``."""
        if isinstance(expression, ast.Subscript):  # Generic[T]
            return self.evaluate(module, expression.value)
        if isinstance(expression, ast.Attribute):
            return self.member(self.evaluate(module, expression.value), expression.attr)
        if isinstance(expression, ast.Name):
            return self._in_module(module, expression.id, frozenset()) or UNKNOWN
        return UNKNOWN

    def instance_of(self, module: Module, annotation: ast.expr | None):
        """Return the object for an annotation: ``C``, ``"C"``, ``C | None`` or ``Optional[C]``."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                annotation = ast.parse(annotation.value, mode="eval").body
            except SyntaxError:
                return UNKNOWN
        if isinstance(annotation, ast.BinOp):
            annotation = annotation.left
        if isinstance(annotation, ast.Subscript):
            if last_name(annotation.value) != "Optional":
                return UNKNOWN
            return self.instance_of(module, annotation.slice)
        found = UNKNOWN if annotation is None else self.evaluate(module, annotation)
        return Instance(found) if is_class(found) else UNKNOWN

    def signature(self, of) -> Signature | None:
        """Return the signature of a function, method, class or module object; None if unknown."""
        if isinstance(of, Instance):
            return self.signature(self.member(of, "forward"))
        if not isinstance(of, Definition) or of.node is None:
            return None
        decorators = {last_name(decorator) for decorator in of.node.decorator_list}
        if isinstance(of.node, ast.ClassDef):
            init = self._in_class(of, "__init__", False)
            return self.signature(init) if init else self._of_fields(of)
        if decorators - _PLAIN_DECORATORS:
            return None
        bound = of.owner is not None and "staticmethod" not in decorators
        return Signature.of(of.node.args, bound)

    def _of_fields(self, of: Definition) -> Signature | None:
        """Return the signature of the constructor that a dataclass or NamedTuple gets."""
        names: dict[str, bool] = {}
        bases = list(self.bases(of))
        named_tuple = any(last_name(b) == "NamedTuple" for b in of.node.bases)
        if not named_tuple:
            if UNKNOWN in bases or not all(_is_dataclass(base.node) for base in bases):
                return None
        for base in reversed([base for base in bases if base is not UNKNOWN]):
            for node in base.node.body:
                if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.dump(node.annotation):
                    if "init=False" not in (ast.unparse(node.value) if node.value else ""):
                        names[node.target.id] = node.value is None
        required = frozenset(name for name, needed in names.items() if needed)
        return Signature(tuple(names), frozenset(), required)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, including those inside if, try, with and for."""
    for node in body:
        yield node
        if not isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
            for part in ("body", "orelse", "finalbody", "handlers"):
                yield from _statements(getattr(node, part, []))


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST | None, ast.expr | None]]:
    """Yield the names that statements bind: name, class or function, annotation."""
    for node in _statements(body):
        if isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
            yield node.name, node, None
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, None, node.annotation
        elif isinstance(node, ast.Assign):
            names = (n for target in node.targets for n in ast.walk(target))
            yield from ((n.id, None, None) for n in names if isinstance(n, ast.Name))


def _set_on(
    receiver: str | None, node: ast.AST, hints: dict
) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the attributes that a statement sets on ``receiver``, each with its type if known."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return
    annotation = getattr(node, "annotation", None)
    if isinstance(node.value, ast.Name):
        annotation = annotation or hints.get(node.value.id)
    elif isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
        annotation = annotation or node.value.func  # perhaps a class
    for target in targets:
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(part, ast.Attribute) and getattr(part.value, "id", None) == receiver:
                yield part.attr, annotation if part is target else None


def imports_of(node: ast.AST, package: str) -> Iterator[tuple[str, str, str | None]]:
    """Yield the names that an import statement binds: (name, module, name in that module)."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield alias.asname or top, alias.name if alias.asname else top, None
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        base = parts[: len(parts) + 1 - node.level] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            yield alias.asname or alias.name, module, alias.name


def is_class(found) -> bool:
    return isinstance(found, Definition) and isinstance(found.node, ast.ClassDef)


def last_name(expression: ast.expr) -> str:
    """Return ``c`` for ``a.b.c`` and for ``a.b.c(…)``."""
    if isinstance(expression, ast.Call):
        return last_name(expression.func)
    return getattr(expression, "attr", getattr(expression, "id", ""))


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any(last_name(decorator) == "dataclass" for decorator in node.decorator_list)
