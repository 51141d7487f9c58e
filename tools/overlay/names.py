# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Names of upstream that our code uses and that another version lacks or declares differently.

griffe reads both versions from their syntax, and follows re-exports and base classes.
"""

import ast
import functools
import gc
import inspect
import logging
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from overlay.errors import FAILED, OverlayError
from overlay.source import Use, module_name, prefixes, uses

try:
    import griffe
except ImportError:
    griffe = None

DEFAULT = type("Default", (), {"__repr__": lambda self: "…"})()
Finding = tuple[str, str, str]  # kind, upstream's name, detail


class Version:
    """The names of a Megatron-LM tree at ``root``."""

    def __init__(self, root: Path):
        if griffe is None:
            raise OverlayError(FAILED, "no griffe: run make setup, or pip install griffelib")
        logging.getLogger("griffe").setLevel(logging.CRITICAL)
        loader = griffe.GriffeLoader(search_paths=[root], allow_inspection=False)
        gc.disable()  # a third of the time, for objects that live to the end
        with warnings.catch_warnings(action="ignore"):  # Python's, about upstream's texts
            self._tree = loader.load("megatron", try_relative_path=False)
        loader.expand_wildcards(self._tree, external=False)
        gc.freeze()
        gc.enable()
        self.find, self.signature = functools.cache(self.find), functools.cache(self.signature)
        self.body = functools.cache(self.body)

    def find(self, name: str):
        """Return griffe's object of a full name; None if there is none.

        A name that upstream imports from another package is the import itself.
        """
        found = self._tree
        for part in name.split(".")[1:]:
            try:
                found = found.members.get(part) or found[part]
                found = found.final_target if found.is_alias else found
            except KeyError:
                return None
            except griffe.AliasResolutionError as error:
                return None if error.alias.target_path.startswith("megatron.") else found
        return found

    def signature(self, name: str) -> inspect.Signature | None:
        """Return the signature of a function or of a class's constructor, without the object that
        a method is called on; None for other names."""
        found = self.find(name)
        if found is None or found.is_alias or not (found.is_function or found.is_class):
            return None
        of_object = found.parent.is_class and "staticmethod" not in found.labels
        parameters = []
        for one in list(found.parameters)[int(found.is_class or of_object) :]:
            kind = getattr(inspect.Parameter, one.kind.name.upper())
            optional = not one.required and "VAR" not in one.kind.name.upper()
            default = DEFAULT if optional else inspect.Parameter.empty
            parameters.append(inspect.Parameter(one.name, kind, default=default))
        return inspect.Signature(parameters, __validate_parameters__=False)

    def body(self, name: str) -> str | None:
        """Return a function's code without its docstrings and comments; None for other names."""
        found = self.find(name)
        if found is None or found.is_alias or not found.is_function:
            return None
        tree = ast.parse(textwrap.dedent(found.source))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
                node.body = node.body[1:]
        return ast.unparse(tree)


def compare(ours: dict[str, bytes], pin: Version, other: Version) -> dict[Finding, list[str]]:
    """Return upstream's names that are gone or do not fit any more, with their places in our files.

    ours: our files, which both versions get; path to source.
    """
    modules = {module_name(path) for path in ours}
    found = {path: uses(source, path) for path, source in ours.items()}
    members = _members({use.name for some in found.values() for use in some}, modules, pin)
    findings: dict[Finding, list[str]] = defaultdict(list)
    for path, use in ((path, use) for path, some in found.items() for use in some):
        if not use.name.startswith((".", "megatron.")) or modules & prefixes(use.name):
            continue
        known = not use.name.startswith(".") and pin.find(use.name) is not None
        if not known and (isinstance(use.node, ast.FunctionDef) or use.name == ".__init__"):
            continue  # an own method, or a constructor of any class
        for name in [use.name] if known else members.get(use.name.rpartition(".")[2], ()):
            for kind, *finding in _check(name, use, pin, other):
                places = findings[kind if known else f"perhaps {kind}", *finding]
                places += [f"{path}:{use.line}"] * (f"{path}:{use.line}" not in places)
    return findings


def _members(used: set[str], ours: set[str], pin: Version) -> dict[str, set[str]]:
    """Return the members, by name, of the classes in upstream's modules that we import.

    They are the candidates for an attribute of an object whose class is unknown.
    """
    names = {name for full in used if full.startswith("megatron.") for name in prefixes(full)}
    found = defaultdict(set)
    for module in map(pin.find, names - ours):
        is_module = module is not None and not module.is_alias and module.is_module
        for owner in module.classes.values() if is_module else ():
            for name, member in {} if owner.is_alias else owner.all_members.items():
                found[name].add(member.path)
    return found


def _check(name: str, use: Use, pin: Version, other: Version) -> Iterator[Finding]:
    label = pin.find(name).path
    if other.find(name) is None:
        while other.find(owner := name.rpartition(".")[0]) is None:
            name = label = owner
        yield "gone", label, ""
        return
    was, now = pin.signature(name), other.signature(name)
    ours = use.replaces or isinstance(use.node, ast.FunctionDef)
    if ours and not use.name.startswith(".") and pin.body(name) != other.body(name):
        yield "body", label, "changed upstream, and overridden or replaced by ours"
    if was is None or now is None or str(was) == str(now):
        return
    if ours:
        if not (use.name.startswith(".") or _takes_all(use.node)):
            yield "signature", label, f"overridden or replaced by ours; was {was}, now {now}"
    elif isinstance(use.node, ast.Call) and _misfit(use.node, was) is None:
        old = was.parameters.values()
        placed = [one.name for one in takewhile(lambda one: one.kind < one.VAR_POSITIONAL, old)]
        pairs = zip(use.node.args, placed, now.parameters, strict=False)
        moved = [f"passes {old} where {new} is now" for _, old, new in pairs if old != new]
        if problem := _misfit(use.node, now) or ", ".join(moved):
            yield "signature", label, f"{problem}; now {now}"


def _takes_all(node: ast.AST) -> bool:
    """Return whether a function takes and passes on whatever it is given."""
    return isinstance(node, ast.FunctionDef) and bool(node.args.vararg and node.args.kwarg)


def _misfit(call: ast.Call, signature: inspect.Signature) -> str | None:
    """Return why a call does not fit a signature, or None."""
    positional = [None for argument in call.args if not isinstance(argument, ast.Starred)]
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    whole = len(positional) == len(call.args) and len(keywords) == len(call.keywords)
    try:
        (signature.bind if whole else signature.bind_partial)(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return None
