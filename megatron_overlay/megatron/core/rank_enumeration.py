# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which ranks form which group: plain data, no processes, any world size.

A :class:`Factorization` names the axes of a contiguous span of ranks. ``dim_names[0]`` is the
fastest axis, as in ``HyperCommGrid`` and in the ``order`` of ``initialize_model_parallel``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class GridError(ValueError, KeyError, RuntimeError):
    """A grid was misused.

    It is a ``ValueError``; it is a ``KeyError`` and a ``RuntimeError`` as well because callers
    written for upstream's grid catch those for missing groups and oversized grids.
    """

    __str__ = Exception.__str__  # KeyError would print the repr of the message


@dataclass(frozen=True)
class Factorization:
    """Ranks of a grid along named axes.

    Attributes:
        dim_names: axis names, fastest first.
        ranks: global ranks; the numpy axes are ``dim_names`` reversed (slowest first).
    """

    dim_names: tuple[str, ...]
    ranks: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes, in the order of ``dim_names``."""
        return self.ranks.shape[::-1]

    def size_of(self, dim: str) -> int:
        """Size of one axis."""
        return self.shape[self.dim_names.index(dim)]

    def slowest_first(self, dims: Sequence[str]) -> list[str]:
        """``dims`` sorted from the slowest to the fastest axis.

        Raises:
            GridError: no dims, a repeated one, or one that is no axis here.
        """
        if not dims:
            raise GridError(f"a group needs at least one dim of {list(self.dim_names)}")
        refuse_duplicates(dims)
        unknown = [d for d in dims if d not in self.dim_names]
        if unknown:
            raise GridError(f"unknown dims {unknown}: the dims are {list(self.dim_names)}")
        return [d for d in reversed(self.dim_names) if d in dims]

    def groups(self, dims: Sequence[str]) -> list[list[int]]:
        """Rank lists that vary along ``dims``, one list per coordinate of the other axes.

        Within a list the last of ``dims`` varies fastest; the lists follow the other axes, the
        fastest of them first.
        """
        slow_to_fast = self.dim_names[::-1]
        others = [d for d in slow_to_fast if d not in dims]
        axes = [slow_to_fast.index(d) for d in (*others, *dims)]
        width = math.prod(self.size_of(d) for d in dims)
        return self.ranks.transpose(axes).reshape(-1, width).tolist()


def factorize(
    shape: Sequence[int], dim_names: Sequence[str], rank_offset: int = 0
) -> Factorization:
    """Lay ``rank_offset … rank_offset + prod(shape) - 1`` out along ``dim_names``.

    Raises:
        GridError: lengths differ, a name is repeated, or a size is not a positive integer.
    """
    check_axes(shape, dim_names)
    size = math.prod(shape)
    ranks = np.arange(rank_offset, rank_offset + size).reshape(tuple(shape)[::-1])
    return Factorization(tuple(dim_names), ranks)


def same_membership(a: Factorization, b: Factorization, dim: str) -> bool:
    """Whether the groups along ``dim`` hold the same ranks in both factorizations."""
    return {frozenset(g) for g in a.groups([dim])} == {frozenset(g) for g in b.groups([dim])}


def embedding_ranks(pp_groups: list[list[int]]) -> list[list[int]]:
    """First and last stage of each pipeline: the holders of tied word embeddings."""
    return [[g[0]] if len(g) == 1 else [g[0], g[-1]] for g in pp_groups]


def position_embedding_ranks(pp_groups: list[list[int]]) -> list[list[int]]:
    """First stage of each pipeline: the holder of the position embeddings."""
    return [[g[0]] for g in pp_groups]


def refuse_duplicates(names: Sequence[str]) -> None:
    """Raise a :class:`GridError` that names what is repeated in ``names``."""
    repeated = sorted({n for n in names if list(names).count(n) > 1})
    if repeated:
        raise GridError(f"dims {list(names)} repeat {repeated}")


def check_axes(shape: Sequence[int], dim_names: Sequence[str]) -> None:
    """Raise a :class:`GridError` unless every axis has one unique name and a positive size."""
    if len(shape) != len(dim_names):
        raise GridError(
            f"len(shape) is {len(shape)} but len(dim_names) is {len(dim_names)}: "
            f"{list(shape)} along {list(dim_names)}"
        )
    refuse_duplicates(dim_names)
    bad = {d: s for d, s in zip(dim_names, shape, strict=True) if s != int(s) or s < 1}
    if bad:
        raise GridError(f"sizes must be positive integers, got {bad}")
