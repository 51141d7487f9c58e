# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Names of upstream that our code uses and that another version lacks or declares differently.

Our files are walked once, and every expression is looked up in two trees: the pin's, where it must
be found, and the other version's. Both include our overlay.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property

from overlay.names import (
    EXTERNAL,
    UNKNOWN,
    Definition,
    Instance,
    Module,
    Tree,
    imports_of,
    is_class,
    last_name,
)

_DOTTED = re.compile(r"megatron(\.\w+)+")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Finding = tuple[str, str, str]  # kind, upstream's name, detail


class Uses:
    """Compares the names that ``ours`` (path to source; in both trees) uses in the two trees.

    ``found`` has the places in our files, as ``path:line``, of each finding.
    """

    def __init__(self, ours: dict[str, bytes], pin: Tree, other: Tree):
        self.ours, self.pin, self.other = ours, pin, other
        self.found: dict[Finding, list[str]] = defaultdict(list)
        self._names = [module_name(path) for path in ours]
        for path, name in zip(ours, self._names, strict=True):
            _File(self, path, name).walk()

    def report(self, where: str, kind: str, name: str, detail: str = "") -> None:
        if where not in (places := self.found[kind, name, detail]):
            places.append(where)

    def check_replaced(self, names: Iterable[str], where: str) -> None:
        """Check functions that our code replaces at run time, which ``where`` declares."""
        for name in names:
            old, new = (tree.follow(*name.split(".")) for tree in (self.pin, self.other))
            was, now = self.pin.signature(old), self.other.signature(new)
            if new is None:
                self.report(where, "gone", name)
            elif was != now:
                self.report(where, "signature", name, f"replaced by ours; was {was}, now {now}")

    def is_upstream(self, found) -> bool:
        module = found if isinstance(found, Module) else getattr(found, "module", None)
        return module is not None and module.path not in self.ours

    @cached_property
    def candidates(self) -> dict[str, list[tuple[Definition, Definition | None]]]:
        """Members, by name, of the classes in upstream's modules that we import.

        Each comes with the other tree's member of that name. They are the candidates for an
        attribute of an object whose class is unknown.
        """
        modules = {}
        for name in self._names:
            for node in ast.walk(self.pin.module(name).tree):
                for _, target, of in imports_of(node, ""):
                    for module in (target, f"{target}.{of}"):
                        if self.is_upstream(self.pin.module(module)):
                            modules[module] = self.pin.module(module)
        found = defaultdict(list)
        for module in modules.values():
            for definition in module.names.values():
                if is_class(definition):
                    there = self.other.follow(module.name, definition.name)
                    for name, member in definition.members.items():
                        found[name].append((member, self.other.member(there, name)))
        return found

    @cached_property
    def our_members(self) -> set[str]:
        """Names that our own code defines, as globals or as attributes."""
        modules = [self.pin.module(name) for name in self._names]
        definitions = [d for module in modules for d in module.names.values()]
        found = {definition.name for definition in definitions}
        return found.union(*(d.members for d in definitions if is_class(d)))


class _File:
    """One file of ours. A pair of scopes has the meaning of local names in either tree."""

    def __init__(self, uses: Uses, path: str, name: str):
        self.uses, self.path = uses, path
        self.trees = (uses.pin, uses.other)
        self.modules = tuple(tree.module(name) for tree in self.trees)

    def walk(self) -> None:
        for statement in self.modules[0].tree.body:
            self._visit(statement, ({}, {}), None)

    def _report(self, node: ast.AST, kind: str, name: str, detail: str = "") -> None:
        self.uses.report(f"{self.path}:{node.lineno}", kind, name, detail)

    def _visit(self, node: ast.AST, scopes: tuple[dict, dict], our_class: str | None) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node, scopes)
        elif isinstance(node, ast.ClassDef):
            our_class = node.name
            self._overrides(node)
        elif isinstance(node, _SCOPES):
            scopes = self._enter(node, scopes, our_class)
        elif isinstance(node, ast.Attribute):
            self._attribute(node, node.value, node.attr, scopes)
        elif isinstance(node, ast.Call):
            self._call(node, scopes)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._dotted(node)
        for child in ast.iter_child_nodes(node):
            self._visit(child, scopes, our_class)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            self._assign(node, scopes)

    def _import(self, node: ast.stmt, scopes: tuple[dict, dict]) -> None:
        for name, target, of in imports_of(node, self.modules[0].package):
            found = [t.follow(target, *([of] if of and of != "*" else [])) for t in self.trees]
            for scope, definition in zip(scopes, found, strict=True):
                scope[name] = definition
            if found[1] is None and self.uses.is_upstream(found[0]):
                whole = target if self.trees[1].module(target) is None or not of else ""
                self._report(node, "gone", whole or f"{target}.{of}")

    def _enter(self, node, scopes, our_class):
        """Return the scopes of a function of ours, with its annotated arguments and self."""
        inner = tuple(dict(scope) for scope in scopes)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for tree, module, scope in zip(self.trees, self.modules, inner, strict=True):
            for argument in arguments:
                scope[argument.arg] = tree.instance_of(module, argument.annotation)
            if our_class in module.names and arguments and arguments[0].arg in ("self", "cls"):
                scope[arguments[0].arg] = Instance(module.names[our_class])
        return inner

    def _assign(self, node, scopes) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for index, (tree, module) in enumerate(zip(self.trees, self.modules, strict=True)):
            if isinstance(node, ast.AnnAssign):
                value = tree.instance_of(module, node.annotation)
            else:
                value = self._evaluate(index, node.value, scopes[index])
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        scopes[index][name.id] = value if name is target else UNKNOWN

    def _evaluate(self, index: int, node: ast.expr, scope: dict):
        """Return what an expression means in one of the trees."""
        tree, module = self.trees[index], self.modules[index]
        if isinstance(node, ast.Name):
            if node.id in scope:
                return scope[node.id]
            found = tree.member(module, node.id)
            return UNKNOWN if found is None else found
        if isinstance(node, ast.Attribute):
            base = self._evaluate(index, node.value, scope)
            return base if base in (None, EXTERNAL) else tree.member(base, node.attr)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "super":
                own = scope.get("self")
                return Instance(own.of, inherited=True) if isinstance(own, Instance) else UNKNOWN
            called = self._evaluate(index, node.func, scope)
            if is_class(called):
                return Instance(called)
            if called is EXTERNAL:
                return EXTERNAL
            return tree.value_of(called) if isinstance(called, Definition) else UNKNOWN
        return UNKNOWN

    def _both(self, node: ast.expr, scopes) -> list:
        return [self._evaluate(index, node, scopes[index]) for index in (0, 1)]

    def _attribute(self, node: ast.AST, value: ast.expr, name: str, scopes) -> None:
        """Check ``value.name``, also when written as getattr or dataclasses.replace."""
        bases = self._both(value, scopes)
        if bases[0] in (EXTERNAL, None) or bases[1] is None:
            return
        if bases[0] is UNKNOWN:
            self._guess(node, name)
            return
        found = [tree.member(base, name) for tree, base in zip(self.trees, bases, strict=True)]
        if found[0] is None or found[0] is UNKNOWN:  # perhaps a subclass has it
            self._guess(node, name)
        elif found[1] is None and self.uses.is_upstream(found[0]):
            label = found[0].name if isinstance(found[0], Module) else found[0].label
            self._report(node, "gone", label)

    def _guess(self, node: ast.AST, name: str) -> None:
        """Report an attribute of an object of an unknown class if a class that has it loses it."""
        lost = [old.label for old, new in self.uses.candidates.get(name, ()) if new is None]
        if lost and name not in self.uses.our_members:
            self._report(node, "perhaps gone", " or ".join(sorted(lost)))

    def _call(self, node: ast.Call, scopes) -> None:
        found = self._both(node.func, scopes)
        method = isinstance(node.func, ast.Attribute)
        if self.uses.is_upstream(_callee(found[0])):
            owner = self._evaluate(0, node.func.value, scopes[0]) if method else None
            if is_class(found[0]) or not is_class(owner):  # C.method(object) passes its receiver
                self._check_call(node, "signature", found)
        elif method and found[0] is UNKNOWN and node.func.attr not in self.uses.our_members:
            pairs = self.uses.candidates.get(node.func.attr, [])
            if len({str(self.trees[0].signature(old)) for old, _ in pairs}) == 1:
                for pair in pairs:
                    self._check_call(node, "perhaps signature", pair)
        first, *rest = [*node.args, None]
        name = rest[0].value if rest and isinstance(rest[0], ast.Constant) else None
        known = first is not None and self._evaluate(0, first, scopes[0])
        if isinstance(name, str) and name.isidentifier() and not isinstance(first, ast.Constant):
            if isinstance(known, (Definition, Instance, Module)):
                self._attribute(node, first, name, scopes)  # getattr(x, "name"), setattr, …
        if last_name(node) == "replace" and isinstance(known, Instance):
            for keyword in node.keywords:  # dataclasses.replace
                if keyword.arg:
                    self._attribute(node, first, keyword.arg, scopes)

    def _check_call(self, node: ast.Call, kind: str, found) -> None:
        old, new = (t.signature(f) for t, f in zip(self.trees, found, strict=True))
        if old is None or new is None or old == new:
            return
        keywords = frozenset(keyword.arg for keyword in node.keywords if keyword.arg)
        starred = any(isinstance(argument, ast.Starred) for argument in node.args)
        count = sum(not isinstance(argument, ast.Starred) for argument in node.args)
        more = starred or any(keyword.arg is None for keyword in node.keywords)
        problem = new.problem(count, keywords, more)
        if problem is None:
            pairs = zip(old.positional[:count], new.positional, strict=False)
            moved = [f"{here} where {there} is now" for here, there in pairs if here != there]
            problem = f"passes {', '.join(moved)}" if moved else None
        if problem and old.problem(count, keywords, more) is None:
            self._report(node, kind, _callee(found[0]).label, f"{problem}; now {new}")

    def _overrides(self, node: ast.ClassDef) -> None:
        """Check methods of ours that override upstream's."""
        classes = [module.names.get(node.name) for module in self.modules]
        if not all(is_class(found) and found.node.lineno == node.lineno for found in classes):
            return
        for method in node.body:
            if not isinstance(method, _SCOPES):
                continue
            found = [
                tree.member(Instance(of, inherited=True), method.name)
                for tree, of in zip(self.trees, classes, strict=True)
            ]
            if not self.uses.is_upstream(found[0]) or found[0].node is None:
                continue
            if found[1] is None:
                self._report(method, "gone", found[0].label, "overridden by ours")
                continue
            old, new = (t.signature(f) for t, f in zip(self.trees, found, strict=True))
            if old and new and old != new:
                detail = f"overridden by ours; was {old}, now {new}"
                self._report(method, "signature", found[0].label, detail)

    def _dotted(self, node: ast.Constant) -> None:
        """Check ``"megatron.core.module.name"``, the target of a helper that patches or imports."""
        if _DOTTED.fullmatch(node.value):
            found = [tree.follow(*node.value.split(".")) for tree in self.trees]
            if found[1] is None and self.uses.is_upstream(found[0]):
                self._report(node, "gone", node.value)


def _callee(found):
    """Return the class or function that a call runs, or the class of a called object."""
    return found.of if isinstance(found, Instance) else found


def module_name(path: str) -> str:
    return path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")


def changed_names(old: Tree, new: Tree, path: str) -> Iterator[Finding]:
    """Yield the functions, classes and methods of upstream's file ``path`` that ``new`` changes.

    They are new, gone, or have another signature.
    """
    name = module_name(path)
    before, after = ({d.label: (t, d) for d in _definitions(t.module(name))} for t in (old, new))
    for label in sorted(before.keys() | after.keys()):
        if label not in after:
            yield "gone", label, ""
        elif label not in before:
            yield "new", label, ""
        else:
            was, now = (tree.signature(found) for tree, found in (before[label], after[label]))
            if was != now:
                yield "signature", label, f"was {was}, now {now}"


def _definitions(module: Module | None) -> Iterator[Definition]:
    for found in module.names.values() if module else ():
        if found.node is not None:
            yield found
            if is_class(found):
                yield from (member for member in found.members.values() if member.node)
