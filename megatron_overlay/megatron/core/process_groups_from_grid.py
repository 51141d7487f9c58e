# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A :class:`ProcessGroupCollection` from a :class:`HyperCommGrid`, without ``parallel_state``."""

from __future__ import annotations

import torch.distributed as dist

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.optimizer_instances import instance_groups

# Field of the collection -> dims of its group, in the order of creation.
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
"""Fields that differ with several optimizer instances or weight rematerialization (GTP) only."""
GRADIENT_FIELDS = frozenset({"dp_cp", "expt_dp"})
"""Their collectives run beside all others, so that their groups serve no other field."""
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
"""A grid without ``cp`` has one CP rank."""
EXPERT_VIEW = "expert"
"""Name of the view along ``expt_tp, ep, expt_dp, pp``, which shares ``pp`` with the base."""

Shared = dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None]
"""Groups by the ranks of all of them: fields with the same ones share a group."""


def groups_from_grid(
    grid: HyperCommGrid, num_distributed_optimizer_instances: int = 1
) -> dict[str, dist.ProcessGroup | None] | None:
    """Every field of ``ProcessGroupCollection`` for the module on ``grid``.

    Collective over the world: all ranks call it, in one order over the grids. Groups that the grid
    has already are taken as they are, so a second call returns the same ones and makes none. The
    grid owns them all: after a failure midway, too, ``grid.destroy()`` frees what was made.

    Fields with the same ranks share a group, but for those of gradients, which are reduced beside
    other collectives, and for dense fields and the experts', as tokens go to experts beside them
    too.

    The fields that only hierarchical CP, a second all-gather communicator or weight
    rematerialization need (``hcp``, ``dp_cp_ag``, ``expt_dp_ag``, ``gtp_remat``,
    ``expt_gtp_remat``) are ``None``, and so are ``inter_dist_opt`` with one optimizer
    instance and the expert fields of a grid without a view ``expert``. ``embd`` and ``pos_embd``
    are ``None`` on pipeline stages that hold no embedding.

    Args:
        grid: of the module.
        num_distributed_optimizer_instances: of its DDP config.

    Returns:
        Groups by field; ``None`` on a rank outside the grid, where there is no module.

    Raises:
        ValueError: a dim of ``tp, dp, pp`` is missing, another base dim than those and ``cp`` has
            a size other than 1, or the optimizer instances don't divide the data-parallel ranks.
    """
    _check_dims(grid)
    experts = _has_experts(grid)
    instances = _optimizer_instances(grid, experts, num_distributed_optimizer_instances)
    make = _Maker(grid)
    dense: Shared = {}
    groups = {
        f: make.over(_present(grid, dims), None, dense, f) for f, dims in DENSE_FIELDS.items()
    }

    pp_groups = grid.get_rank_enum("pp")
    groups["embd"] = make.derived("embd", embedding_ranks(pp_groups), dense)
    groups["pos_embd"] = make.derived("pos_embd", position_embedding_ranks(pp_groups), {})

    expert: Shared = {}
    for field, dims in EXPERT_FIELDS.items():
        groups[field] = make.over(dims, EXPERT_VIEW, expert, field) if experts else None

    groups.update({field: groups[same] for field, same in SAME_GROUPS.items()})
    groups.update(dict.fromkeys(UNUSED_FIELDS))
    for field, rank_enum in instances.items():
        name = f"{field}/{num_distributed_optimizer_instances}"
        groups[field] = make.derived(name, rank_enum, {})

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


def _has_experts(grid: HyperCommGrid) -> bool:
    try:
        grid.get_rank_enum("ep", view=EXPERT_VIEW)
    except KeyError:
        return False
    return True


def _optimizer_instances(
    grid: HyperCommGrid, experts: bool, number: int
) -> dict[str, list[list[int]]]:
    if number == 1:
        return {}
    expt_dp = grid.get_rank_enum("expt_dp", view=EXPERT_VIEW) if experts else None
    dp_cp = grid.get_rank_enum(_present(grid, DENSE_FIELDS["dp_cp"]))
    return instance_groups(dp_cp, expt_dp, number)


def _present(grid: HyperCommGrid, dims: list[str]) -> list[str]:
    return [dim for dim in dims if dim in grid.dim_names]


def embedding_ranks(pp_groups: list[list[int]]) -> list[list[int]]:
    """First and last stage of each pipeline, which hold the two ends of a tied embedding."""
    return [sorted({ranks[0], ranks[-1]}) for ranks in pp_groups]


def position_embedding_ranks(pp_groups: list[list[int]]) -> list[list[int]]:
    """First stage of each pipeline."""
    return [ranks[:1] for ranks in pp_groups]


class _Maker:
    """Makes the groups that a grid lacks; the grid owns them.

    Args:
        grid: of the module.
    """

    def __init__(self, grid: HyperCommGrid) -> None:
        self.grid = grid

    def over(
        self, dims: list[str], view: str | None, shared: Shared, field: str
    ) -> dist.ProcessGroup | None:
        """The group over ``dims``; where none is left, this rank alone."""
        grid = self.grid
        if not dims:
            return self._alone()
        ranks = _ranks(grid.get_rank_enum(dims, view=view))
        spec = grid._resolve_view(view)
        ordered, _ = grid._order_dims_for_view(spec, dims)
        key, _, _ = grid._canonical_pg_key_and_enum_view(spec, ordered)
        if key not in grid._pgs:
            if len(ranks[0]) == 1:
                grid._pgs[key] = self._alone()
            elif ranks in shared and field not in GRADIENT_FIELDS:
                grid._pgs[key] = shared[ranks]
            else:
                grid.create_pg(dims, view=view)
        if field not in GRADIENT_FIELDS:
            shared.setdefault(ranks, grid._pgs[key])
        return grid._pgs[key]

    def derived(
        self, name: str, rank_enum: list[list[int]], shared: Shared
    ) -> dist.ProcessGroup | None:
        """Groups that are no whole dims, by a name of ours."""
        grid, key, ranks = self.grid, ("derived", (name,)), _ranks(rank_enum)
        if key not in grid._pgs:
            if all(len(group) == 1 for group in ranks):
                group = self._alone() if (dist.get_rank(),) in ranks else None
            elif ranks in shared:
                group = shared[ranks]
            else:
                group, _ = dist.new_subgroups_by_enumeration(rank_enum, backend=grid.backend)
            grid._pgs[key] = group
        return grid._pgs[key]

    def _alone(self) -> dist.ProcessGroup | None:
        """This rank's group of one; None outside the grid.

        Every rank names its own: PyTorch counts calls, which are one on all ranks, and a group of
        one meets nobody. Others than these all ranks make alike: PyTorch finds one that only its
        members make by how many groups they are in, which the ends of a pipeline have one more of.
        """
        grid, key = self.grid, ("derived", ("alone",))
        if key not in grid._pgs:
            inside = grid.is_current_rank_in_grid()
            rank = dist.get_rank() if inside else grid.rank_offset
            group = dist.new_group([rank], backend=grid.backend)
            grid._pgs[key] = group if inside else None
        return grid._pgs[key]


def _ranks(rank_enum: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, rank_enum))
