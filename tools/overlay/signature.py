# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a function takes, and whether a call fits it."""

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """What a call may pass. ``positional`` holds names in order; receivers are left out."""

    positional: tuple[str, ...]
    keyword: frozenset[str]
    required: frozenset[str]
    any_positional: bool = False
    any_keyword: bool = False

    @classmethod
    def of(cls, args: ast.arguments, bound: bool) -> "Signature":
        """The signature of a function; ``bound``: its first argument is the receiver."""
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
        """Why a call with so many positional arguments and these keywords fails. ``more``: it also
        passes ``*args`` or ``**kwargs``."""
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
