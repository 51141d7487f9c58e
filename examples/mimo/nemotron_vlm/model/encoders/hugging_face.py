# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""How an entry says what its tensors are called in Hugging Face models; plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from examples.mimo.common.errors import UserError


@dataclass(frozen=True)
class TensorRows:
    """``count`` rows of the Hugging Face tensor ``name`` from row ``start``; by default all."""

    name: str
    start: int = 0
    count: int | None = None


Table = Mapping[str, tuple[TensorRows, ...]]
"""For each tensor of ours, the rows whose concatenation it is."""


Files = Any
"""The converter's tensors of a directory: ``shapes`` by name, ``read(name)``, and ``directory``."""


@dataclass(frozen=True)
class Part:
    """A part of the model that a whole VLM of Hugging Face has.

    name: in messages. ours, theirs: prefixes of names. config: field of the VLM's configuration
    that describes the part; None for all of it.
    """

    expected: ClassVar[Mapping[str, Any]] = {}
    """Fields of transformers' configuration for which our model supports one value."""

    same: ClassVar[Mapping[str, str]] = {}
    """Fields of transformers' configuration, by the entry's fields that have the same values."""

    unneeded: ClassVar[tuple[str, ...]] = ()
    """Patterns of tensors that our model does not have, after the prefix."""

    name: str
    ours: str
    theirs: str
    config: str | None = None

    def sizes(self, base: Any, config: Any, files: Files) -> Any:
        """Return ``base``, the entry, with the sizes of a model.

        Args:
            config: transformers' configuration of the part.

        Raises:
            UserError: our model does not support a size or option; the message names it.
        """
        check_values(f"the {self.name}", config, self.expected)
        return replace(base, **{ours: getattr(config, same) for ours, same in self.same.items()})

    def fields(self, sizes: Any) -> dict[str, Any]:
        """Return the fields of transformers' configuration of the part; the inverse of `sizes`."""
        return {**self.expected, **{same: getattr(sizes, ours) for ours, same in self.same.items()}}

    def table(self, sizes: Any) -> Table:
        """Return the table of the part's tensors, without the prefixes."""
        raise NotImplementedError

    def not_held(self, files: Files) -> list[str]:
        """Return the names of the part's tensors that our model can do without.

        Raises:
            UserError: our model cannot do without one of them.
        """
        patterns = [self.theirs + pattern for pattern in self.unneeded]
        return [n for n in files.shapes if any(fnmatchcase(n, each) for each in patterns)]


def interleaved(
    qkv: list[TensorRows], heads: int, groups: int, channels: int
) -> tuple[TensorRows, ...]:
    """Interleave query heads, key and value of each group, the order of our rows.

    Args:
        qkv: the starts of the queries, keys and values of all heads.
        heads, groups: number of query heads, and of the key-value heads that they share.
        channels: number of rows of a head.
    """
    query = heads // groups * channels
    rows = []
    for group in range(groups):
        for source, count in zip(qkv, (query, channels, channels), strict=True):
            rows.append(TensorRows(source.name, source.start + group * count, count))
    return tuple(rows)


def check_values(what: str, config: object, expected: Mapping[str, object]) -> None:
    """Check that fields of a configuration have the only values that our model supports.

    Raises:
        UserError: a field of ``what`` has another value; the message names every such field.
    """
    wrong = [
        f"{name} is {getattr(config, name)}, and ours has {value}"
        for name, value in expected.items()
        if getattr(config, name) != value
    ]
    if wrong:
        raise UserError(f"{what} cannot be expressed:\n  " + "\n  ".join(wrong))
