# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Names of upstream that our code uses and that another version lacks or declares differently.

griffe reads both versions from their syntax, and follows re-exports and base classes.
"""

import ast
import functools
import inspect
import logging
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import griffe

from overlay.source import Use, module_name, prefixes, uses

DEFAULT = type("Default", (), {"__repr__": lambda self: "…"})()
Finding = tuple[str, str, str]  # kind, upstream's name, detail


class Version:
    """The names of the Megatron-LM tree at ``root``, which is read once."""

    def __init__(self, root: Path):
        logging.getLogger("griffe").setLevel(logging.CRITICAL)
        loader = griffe.GriffeLoader(search_paths=[root], allow_inspection=False)
        with warnings.catch_warnings(action="ignore"):  # Python's, about upstream's texts
            self._tree = loader.load("megatron")
        loader.expand_wildcards(self._tree, external=False)
        for method in (self.find, self.signature, self.body):
            setattr(self, method.__name__, functools.cache(method))

    def find(self, name: str):
        """Return griffe's object of a full name; None if there is none.

        A name that upstream imports from another package is the import itself.
        """
        try:
            found = self._tree[name.removeprefix("megatron.")]
            return found.final_target if found.is_alias else found
        except KeyError:
            return None
        except griffe.AliasResolutionError as error:
            return None if error.alias.target_path.startswith("megatron.") else error.alias

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
        """Return a function's code without its comments; None for other names."""
        found = self.find(name)
        if found is None or found.is_alias or not found.is_function:
            return None
        return ast.unparse(ast.parse(textwrap.dedent(found.source)))


def compare(ours: dict[str, bytes], pin: Version, other: Version) -> dict[Finding, list[str]]:
    """Return upstream's names that are gone or do not fit any more, with their places in our files.

    ours: our files, which both versions get; path to source.
    """
    modules = {module_name(path) for path in ours}
    findings: dict[Finding, list[str]] = defaultdict(list)
    found = [(path, use) for path, source in ours.items() for use in uses(source, path)]
    for path, use in found:
        is_ours = not use.name.startswith("megatron.") or modules & prefixes(use.name)
        if is_ours or pin.find(use.name) is None:  # or a method of our own
            continue
        for finding in _check(use, pin, other):
            places = findings[finding]
            places += [f"{path}:{use.line}"] * (f"{path}:{use.line}" not in places)
    return findings


def _check(use: Use, pin: Version, other: Version) -> Iterator[Finding]:
    name, label = use.name, pin.find(use.name).path
    if other.find(name) is None:
        while other.find(owner := name.rpartition(".")[0]) is None:
            name = label = owner
        yield "gone", label, ""
        return
    was, now = pin.signature(name), other.signature(name)
    ours = use.replaces or isinstance(use.node, ast.FunctionDef)
    if ours and pin.body(name) != other.body(name):
        yield "body", label, "changed upstream, and overridden or replaced by ours"
    if was is None or now is None or was == now:
        return
    if ours:
        taken = getattr(use.node, "args", None)  # a function may take whatever it is given
        if not (taken and taken.vararg and taken.kwarg):
            yield "signature", label, f"overridden or replaced by ours; was {was}, now {now}"
    elif isinstance(use.node, ast.Call) and _misfit(use.node, was) is None:
        old = was.parameters.values()
        placed = [one.name for one in takewhile(lambda one: one.kind < one.VAR_POSITIONAL, old)]
        pairs = zip(use.node.args, placed, now.parameters, strict=False)
        moved = [f"passes {old} where {new} is now" for _, old, new in pairs if old != new]
        if problem := _misfit(use.node, now) or ", ".join(moved):
            yield "signature", label, f"{problem}; now {now}"


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
