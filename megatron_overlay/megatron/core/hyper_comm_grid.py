# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Process groups from named factorizations of one contiguous span of ranks."""

import math
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron.core.rank_enumeration import (
    Factorization,
    GridError,
    factorize,
    same_membership,
)

__all__ = ["GridError", "HyperCommGrid"]

ALONE = "@alone"


class HyperCommGrid:
    """Ranks ``rank_offset … rank_offset + size - 1`` along named dims, and the groups over them.

    ``dim_names[0]`` is the fastest dim. The base factorization is ``shape`` along ``dim_names``;
    :meth:`register_view` adds others of the same ranks, e.g. the expert dims of a MoE model. Which
    ranks form a group is known without any process (:meth:`get_rank_enum`); a process group exists
    after :meth:`create_pg`, which every rank of the **world** calls, members or not, in one order.

    Args:
        shape: size of each dim.
        dim_names: name of each dim, fastest first.
        rank_offset: first rank of the grid.
        backend: backend of the groups; ``None`` takes the default group's.

    Raises:
        GridError: (a ``ValueError``) malformed axes, or more ranks than the world has.
    """

    def __init__(
        self,
        shape: list[int],
        dim_names: list[str],
        rank_offset: int = 0,
        backend: str | None = None,
    ) -> None:
        if rank_offset < 0:
            raise GridError(f"rank_offset must be non-negative, got {rank_offset}")
        self._base = factorize(shape, dim_names, rank_offset)
        self.shape = list(shape)
        self.dim_names = list(dim_names)
        self.size = math.prod(shape)
        self.rank_offset = rank_offset
        self.backend = backend
        self._views: dict[str, Factorization] = {}
        self._shared_dims: dict[str, frozenset[str]] = {}
        self._pgs: dict[str, dist.ProcessGroup | None] = {}
        self._owned: list[dist.ProcessGroup] = []
        self._num_groups: dict[str, int] = {}
        world_size = _world_size()
        if rank_offset + self.size > world_size:
            raise GridError(
                f"Grid shape {self.shape} is over sized with world size {world_size} and rank "
                f"offset {rank_offset}: it needs ranks up to {rank_offset + self.size - 1}"
            )

    def register_view(
        self,
        name: str,
        shape: Sequence[int],
        dim_names: Sequence[str],
        shared_dims: Sequence[str] = (),
    ) -> None:
        """Add a second factorization of the same ranks.

        The experts of a pipelined model: ``register_view("expert", [etp, ep, edp, pp],
        ["expt_tp", "ep", "expt_dp", "pp"], shared_dims=["pp"])`` beside ``[tp, cp, dp, pp]``.

        Args:
            name: how ``view=`` refers to it.
            shape: size of each dim of the view.
            dim_names: name of each dim of the view, fastest first.
            shared_dims: dims that mean the same groups in the base and in the view; asked for
                through the view, they are the base's groups.

        Raises:
            GridError: the name is taken, the axes are malformed, the products differ, or a shared
                dim is missing from one side or groups other ranks there.
        """
        if name in self._views:
            raise GridError(f"view {name!r} is registered already: {list(self._views)}")
        view = factorize(shape, dim_names, self.rank_offset)
        if view.ranks.size != self.size:
            raise GridError(
                f"view {name!r} of shape {list(shape)} covers {view.ranks.size} ranks, the "
                f"grid of shape {self.shape} has {self.size}"
            )
        for dim in shared_dims:
            if dim not in self.dim_names or dim not in view.dim_names:
                raise GridError(
                    f"shared dim {dim!r} must be in the base {self.dim_names} and in view "
                    f"{name!r} {list(view.dim_names)}"
                )
            if not same_membership(self._base, view, dim):
                raise GridError(
                    f"shared dim {dim!r} groups {self._base.groups([dim])[0]}… in the base "
                    f"{self.shape} {self.dim_names} but {view.groups([dim])[0]}… in view {name!r} "
                    f"{list(view.shape)} {list(view.dim_names)}"
                )
        self._views[name] = view
        self._shared_dims[name] = frozenset(shared_dims)

    def create_pg(
        self, dims: str | Sequence[str], view: str | None = None, **kwargs: Any
    ) -> dist.ProcessGroup | None:
        """Create the groups over ``dims``; collective over the world.

        Args:
            dims: one dim or several.
            view: the view they belong to; ``None`` is the base.
            **kwargs: passed on to ``torch.distributed.new_subgroups_by_enumeration``.

        Returns:
            The group of this rank; ``None`` outside the grid.

        Raises:
            GridError: unknown or repeated dims, or groups that exist already.
        """
        key, ordered, factorization = self._resolve(dims, view)
        return self._create(key, factorization.groups(ordered), **kwargs)

    def get_pg(
        self, dims: str | Sequence[str], view: str | None = None
    ) -> dist.ProcessGroup | None:
        """The group of this rank over ``dims``, made before; ``None`` outside the grid.

        Raises:
            GridError: unknown or repeated dims, or groups that don't exist yet.
        """
        return self._get(self._resolve(dims, view)[0])

    def get_rank_enum(self, dims: str | Sequence[str], view: str | None = None) -> list[list[int]]:
        """The rank lists that :meth:`create_pg` makes groups of, this rank's or not."""
        _, ordered, factorization = self._resolve(dims, view)
        return factorization.groups(ordered)

    def create_derived_pg(
        self, name: str, rank_enum: list[list[int]], **kwargs: Any
    ) -> dist.ProcessGroup | None:
        """Create groups that are no whole dims, e.g. the first and last stage of each pipeline.

        Args:
            name: how :meth:`get_derived_pg` refers to them.
            rank_enum: disjoint lists of ranks of this grid.

        Returns:
            The group of this rank; ``None`` when it is in none of the lists.

        Raises:
            GridError: the name is taken, or a rank is repeated or outside the grid.
        """
        ranks = [r for group in rank_enum for r in group]
        outside = [r for r in ranks if not 0 <= r - self.rank_offset < self.size]
        if outside or len(set(ranks)) != len(ranks):
            raise GridError(
                f"groups {name!r} need distinct ranks of {self.rank_offset}…"
                f"{self.rank_offset + self.size - 1}, got {rank_enum}"
            )
        return self._create(f"@{name}", rank_enum, **kwargs)

    def get_derived_pg(self, name: str) -> dist.ProcessGroup | None:
        """The group that :meth:`create_derived_pg` made for this rank under ``name``."""
        return self._get(f"@{name}")

    def has_derived_pg(self, name: str) -> bool:
        """Whether :meth:`create_derived_pg` was called for ``name``."""
        return f"@{name}" in self._pgs

    @property
    def num_groups(self) -> int:
        """How many process groups exist over all ranks of the grid."""
        return sum(self._num_groups.values())

    @property
    def group_counts(self) -> dict[str, int]:
        """How many process groups each key stands for, in order of creation.

        All dims of size 1 share the groups under ``"@alone"``.
        """
        return dict(self._num_groups)

    def destroy(self) -> None:
        """Free every group of this grid once; the grid can make groups again afterwards."""
        self._pgs.clear()
        self._num_groups.clear()
        while self._owned:
            dist.destroy_process_group(self._owned.pop(0))

    def is_current_rank_in_grid(self) -> bool:
        """Whether this process is one of the grid's ranks."""
        return 0 <= dist.get_rank() - self.rank_offset < self.size

    def _create(self, key: str, rank_enum: list[list[int]], **kwargs) -> dist.ProcessGroup | None:
        if key in self._pgs:
            raise GridError(
                f"Process group {key} has already been created, maybe with other options than "
                f"those asked for now; get_pg returns it. Made so far: {self.group_counts}"
            )
        if all(len(ranks) == 1 for ranks in rank_enum):
            alone = self._alone()
            pg = alone if [dist.get_rank()] in rank_enum else None
        else:
            pg = self._new_groups(key, rank_enum, **kwargs)
        self._pgs[key] = pg
        return pg

    def _alone(self) -> dist.ProcessGroup | None:
        """The group of this rank by itself.

        All dims of size 1 share it: nothing is sent in it, and making one costs a world-wide
        rendezvous per rank of the grid.
        """
        if ALONE not in self._pgs:
            span = range(self.rank_offset, self.rank_offset + self.size)
            self._pgs[ALONE] = self._new_groups(ALONE, [[r] for r in span])
        return self._pgs[ALONE]

    def _new_groups(self, key: str, rank_enum: list[list[int]], **kwargs):
        pg, _ = dist.new_subgroups_by_enumeration(rank_enum, backend=self.backend, **kwargs)
        self._num_groups[key] = len(rank_enum)
        if pg is not None:
            self._owned.append(pg)
        return pg

    def _get(self, key: str) -> dist.ProcessGroup | None:
        if key not in self._pgs:
            raise GridError(
                f"Process group for {key} hasn't been created; made so far: {list(self._pgs)}"
            )
        return self._pgs[key]

    def _resolve(
        self, dims: str | Sequence[str], view: str | None
    ) -> tuple[str, list[str], Factorization]:
        """Key, dims from slow to fast, and factorization of the groups over ``dims``."""
        names = [dims] if isinstance(dims, str) else list(dims)
        if view is not None and view not in self._views:
            raise GridError(f"view {view!r} is not registered: {list(self._views)}")
        if view is not None and names and self._shared_dims[view].issuperset(names):
            view = None
        factorization = self._base if view is None else self._views[view]
        try:
            ordered = factorization.slowest_first(names)
        except GridError as error:
            raise GridError(f"{error}{self._where_else(names, view)}") from None
        prefix = "" if view is None else f"{view}:"
        return prefix + "-".join(ordered), ordered, factorization

    def _where_else(self, names: list[str], view: str | None) -> str:
        """What to add to an unknown-dim error: which other factorization has the dim."""
        if view is None:
            others = {f"view {v!r}": f.dim_names for v, f in self._views.items()}
            known = self._base.dim_names
        else:
            others = {"the base": self._base.dim_names}
            known = self._views[view].dim_names
        foreign = [n for n in names if n not in known]
        hints = [f"{n!r} is a dim of {o}" for o, d in others.items() for n in foreign if n in d]
        return f" ({'; '.join(hints)}; one group cannot mix the two)" if hints else ""

    def _gen_rank_enum(self, dims: list[str]) -> list[list[int]]:
        """Rank lists over base dims in the order given, the last fastest (upstream's callers)."""
        return self._base.groups(dims)


def _world_size() -> int:
    """Ranks in the world: the launcher's ``WORLD_SIZE`` first, so that no process is needed."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if dist.is_initialized():
        return dist.get_world_size()
    raise GridError("cannot tell the world size: set WORLD_SIZE or initialize torch.distributed")
