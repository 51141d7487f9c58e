# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Signatures of functions, and checks of calls against them."""

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """Arguments that a call may pass. ``positional`` has names in order, without the receiver."""

    positional: tuple[str, ...]
    keyword: frozenset[str]
    required: frozenset[str]
    any_positional: bool = False
    any_keyword: bool = False

    @classmethod
    def of(cls, args: ast.arguments, bound: bool) -> "Signature":
        """Return the signature of a function; if ``bound``, its first argument is the receiver."""
        positional = [arg.arg for arg in args.posonlyargs + args.args]
        needed = positional[: len(positional) - len(args.defaults)]
        pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
        required = {arg.arg for arg, default in pairs if default is None}
        return cls(
            tuple(positional[int(bound) :]),
            frozenset(arg.arg for arg in args.kwonlyargs),
            frozenset({*needed[int(bound) :], *required}),
            args.vararg is not None,
            args.kwarg is not None,
        )

    def problem(self, positional: int, keywords: frozenset[str], more: bool) -> str | None:
        """Return why a call with these arguments fails, or None.

        positional: number of positional arguments. keywords: names of the others. more: whether
        ``*args`` or ``**kwargs`` are passed as well.
        """
        if positional > len(self.positional) and not self.any_positional:
            return f"takes {len(self.positional)} positional arguments, {positional} are passed"
        if not self.any_keyword and (unknown := keywords - {*self.positional, *self.keyword}):
            return f"no argument {', '.join(sorted(unknown))}"
        missing = self.required - keywords - {*self.positional[:positional]}
        return None if more or not missing else f"needs {', '.join(sorted(missing))}"

    def __str__(self) -> str:
        optional = {*self.positional, *self.keyword} - self.required
        names = [*self.positional, *["*args"] * self.any_positional, *sorted(self.keyword)]
        names = [f"{name}=" if name in optional else name for name in names]
        return f"({', '.join(names + ['**kwargs'] * self.any_keyword)})"
