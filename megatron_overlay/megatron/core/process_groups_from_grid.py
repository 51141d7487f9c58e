# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A :class:`ProcessGroupCollection` from a :class:`HyperCommGrid`, without ``parallel_state``."""

import torch.distributed as dist

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.parallel_state import default_embedding_ranks, default_position_embedding_ranks

# Dims of the group of each field, in the order of creation.
DENSE_FIELDS: dict[str, list[str]] = {
    "tp": ["tp"],
    "cp": ["cp"],
    "pp": ["pp"],
    "dp": ["dp"],
    "dp_cp": ["cp", "dp"],
    "tp_cp": ["tp", "cp"],
    "tp_dp_cp": ["tp", "cp", "dp"],
    "mp": ["tp", "pp"],
    "intra_dist_opt": ["tp", "cp", "dp", "pp"],
}
EXPERT_FIELDS: dict[str, list[str]] = {
    "ep": ["ep"],
    "expt_tp": ["expt_tp"],
    "expt_dp": ["expt_dp"],
    "tp_ep": ["expt_tp", "ep"],
    "tp_ep_pp": ["expt_tp", "ep", "pp"],
}
SAME_GROUPS = {
    "intra_dp_cp": "dp_cp",
    "intra_expt_dp": "expt_dp",
    "dp_cp_gtp_remat": "dp_cp",
    "expt_dp_gtp_remat": "expt_dp",
    "tp_ep_pp_with_egtp_remat": "tp_ep_pp",
}
"""Fields that differ from another field only with several optimizer instances or with weight
rematerialization (GTP)."""
GRADIENT_FIELDS = frozenset({"dp_cp", "expt_dp"})
"""Fields with groups of their own, as their collectives overlap those of all other fields."""
UNUSED_FIELDS = (
    "inter_dist_opt",
    "hcp",
    "dp_cp_ag",
    "expt_dp_ag",
    "gtp_remat",
    "expt_gtp_remat",
)
DENSE_DIMS = frozenset(DENSE_FIELDS["intra_dist_opt"])
REQUIRED_DIMS = DENSE_DIMS - {"cp"}
"""Dims that a grid must have; one without ``cp`` has one CP rank."""
EXPERT_VIEW = "expert"
"""Name of the view along ``expt_tp, ep, expt_dp, pp``, which shares ``pp`` with the base."""

INSTANCE = "instance"
"""Dim between distributed-optimizer instances, in views made for several."""

Shared = dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None]
"""This rank's group by the rank lists of all groups; fields with the same lists share it."""


def groups_from_grid(
    grid: HyperCommGrid, num_distributed_optimizer_instances: int = 1
) -> dict[str, dist.ProcessGroup | None] | None:
    """Return every field of ``ProcessGroupCollection`` for the module on ``grid``.

    Collective over the world: all ranks call it, in one order over the grids. Groups that the grid
    already has are reused, so a second call returns the same groups and makes none. The grid owns
    all groups: ``grid.destroy()`` frees them, even after a failure midway.

    Fields with the same ranks share a group, with two exceptions: gradient fields, whose reductions
    overlap other collectives, share no group; and dense fields share none with expert fields, as
    the dispatch of tokens to experts overlaps dense collectives.

    Fields needed only by hierarchical CP, a second all-gather communicator or weight
    rematerialization (``hcp``, ``dp_cp_ag``, ``expt_dp_ag``, ``gtp_remat``, ``expt_gtp_remat``) are
    None. So are ``inter_dist_opt`` with one optimizer instance, and the expert fields of a grid
    without a view ``expert``. ``embd`` and ``pos_embd`` are None on pipeline stages that hold no
    embedding.

    Args:
        num_distributed_optimizer_instances: value of that name in the module's DDP config.

    Returns:
        Groups by field; None on a rank outside the grid, which does not hold the module.

    Raises:
        ValueError: ``tp``, ``dp`` or ``pp`` is missing; a base dim other than these and ``cp`` has
            a size other than 1; or the optimizer instances don't divide the data-parallel ranks.
    """
    _check_dims(grid)
    experts = EXPERT_VIEW in grid._views
    instances = _instance_groups(grid, experts, num_distributed_optimizer_instances)
    make = _Maker(grid)
    dense: Shared = {}
    groups = {
        field: make.over(_present(grid, dims), None, {} if field in GRADIENT_FIELDS else dense)
        for field, dims in DENSE_FIELDS.items()
    }

    pipelines = grid.get_rank_enum("pp")
    tied = [default_embedding_ranks(ranks) for ranks in pipelines]  # the embedding's two copies
    first = [default_position_embedding_ranks(ranks) for ranks in pipelines]
    groups["embd"] = make.derived("embd", tied, dense)
    groups["pos_embd"] = make.derived("pos_embd", first, {})

    expert: Shared = {}
    for field, dims in EXPERT_FIELDS.items():
        shared = {} if field in GRADIENT_FIELDS else expert
        groups[field] = make.over(dims, EXPERT_VIEW, shared) if experts else None

    groups.update({field: groups[same] for field, same in SAME_GROUPS.items()})
    groups.update(dict.fromkeys(UNUSED_FIELDS))
    for field, (dims, view) in instances.items():
        groups[field] = make.over(dims, view, {})

    return groups if grid.is_current_rank_in_grid() else None


def _check_dims(grid: HyperCommGrid) -> None:
    missing = sorted(REQUIRED_DIMS.difference(grid.dim_names))
    if missing:
        raise ValueError(
            f"a module's grid needs dims {sorted(REQUIRED_DIMS)} (size 1 where unused); "
            f"{grid.dim_names} lacks {missing}"
        )
    sizes = dict(zip(grid.dim_names, grid.shape, strict=True))
    extra = {d: s for d, s in sizes.items() if d not in DENSE_DIMS and s != 1}
    if extra:
        raise ValueError(
            f"base dims {extra} multiply the ranks of {sizes}; put expert dims into a view: "
            f"register_view({EXPERT_VIEW!r}, shape, ['expt_tp', 'ep', 'expt_dp', 'pp'], ['pp'])"
        )


def _instance_groups(
    grid: HyperCommGrid, experts: bool, instances: int
) -> dict[str, tuple[list[str], str]]:
    """Return dims and view of the groups that several optimizer instances add, by field.

    With n instances the optimizer's state is sharded over 1/n of the data-parallel ranks; gradients
    are reduce-scattered within an instance, then all-reduced between instances. Views of the grid
    cut the data-parallel dims into an inner one and one between instances.
    """
    if instances == 1:
        return {}
    dense = _cut_into_instances(grid, None, "dp", instances)
    between = grid.get_rank_enum(INSTANCE, view=dense)
    groups = {
        "intra_dp_cp": (_present(grid, DENSE_FIELDS["dp_cp"]), dense),
        "inter_dist_opt": ([INSTANCE], dense),
        "intra_dist_opt": (_present(grid, DENSE_FIELDS["intra_dist_opt"]), dense),
    }
    if experts:
        expert = _cut_into_instances(grid, EXPERT_VIEW, "expt_dp", instances)
        if between != (of_experts := grid.get_rank_enum(INSTANCE, view=expert)):
            raise ValueError(
                f"{instances} optimizer instances pair ranks {between} by their dense groups, but "
                f"{of_experts} by their expert groups: make dp the slowest dim inside a pipeline "
                f"stage, and expt_dp the slowest of the experts"
            )
        groups["intra_expt_dp"] = (EXPERT_FIELDS["expt_dp"], expert)
    return groups


def _cut_into_instances(grid: HyperCommGrid, view: str | None, dim: str, instances: int) -> str:
    """Register a view with ``dim`` cut into instances, unless there is one; return its name."""
    base, name = grid._resolve_view(view), f"{dim} in {instances} instances"
    at = base.dim_names.index(dim)
    inner, rest = divmod(base.shape[at], instances)
    if rest:
        raise ValueError(
            f"{instances} optimizer instances must divide {dim} = {base.shape[at]} ranks"
        )
    if name not in grid._views:
        shape = [*base.shape[:at], inner, instances, *base.shape[at + 1 :]]
        dims = [*base.dim_names[: at + 1], INSTANCE, *base.dim_names[at + 1 :]]
        grid.register_view(name, shape, dims, shared_dims=["pp"])
    return name


def _present(grid: HyperCommGrid, dims: list[str]) -> list[str]:
    return [dim for dim in dims if dim in grid.dim_names]


class _Maker:
    """Makes the groups that a grid lacks; the grid owns them."""

    def __init__(self, grid: HyperCommGrid) -> None:
        self.grid = grid

    def over(self, dims: list[str], view: str | None, shared: Shared) -> dist.ProcessGroup | None:
        """Return this rank's group over ``dims``; without dims, the group of this rank alone."""
        grid = self.grid
        if not dims:
            return self._alone()
        spec = grid._resolve_view(view)
        ordered, _ = grid._order_dims_for_view(spec, dims)
        key, _, _ = grid._canonical_pg_key_and_enum_view(spec, ordered)
        return self._kept(key, grid.get_rank_enum(dims, view=view), shared)

    def derived(
        self, name: str, rank_enum: list[list[int]], shared: Shared
    ) -> dist.ProcessGroup | None:
        """Return this rank's group in ``rank_enum``, which spans no whole dims."""
        return self._kept(("derived", (name,)), rank_enum, shared)

    def _kept(
        self, key: object, rank_enum: list[list[int]], shared: Shared
    ) -> dist.ProcessGroup | None:
        groups, ranks = self.grid._pgs, tuple(map(tuple, rank_enum))
        if key not in groups:
            if all(len(group) == 1 for group in ranks):
                alone = self._alone()  # on all ranks alike
                groups[key] = alone if (dist.get_rank(),) in ranks else None
            elif ranks in shared:
                groups[key] = shared[ranks]
            else:
                made = dist.new_subgroups_by_enumeration(rank_enum, backend=self.grid.backend)
                groups[key], _ = made
        shared.setdefault(ranks, groups[key])
        return groups[key]

    def _alone(self) -> dist.ProcessGroup | None:
        """Return this rank's group of one; None outside the grid.

        Every rank passes its own rank in the same call: PyTorch numbers new groups by the count of
        calls, which stays equal on all ranks, and a group of one has no peers to agree with. All
        larger groups must be made by all ranks in the same way. PyTorch names a group made by its
        members alone after the number of groups they are in, which differs between ranks, as the
        ends of a pipeline are in one more group.
        """
        grid, key = self.grid, ("derived", ("alone",))
        if key not in grid._pgs:
            inside = grid.is_current_rank_in_grid()
            rank = dist.get_rank() if inside else grid.rank_offset
            group = dist.new_group([rank], backend=grid.backend)
            grid._pgs[key] = group if inside else None
        return grid._pgs[key]
