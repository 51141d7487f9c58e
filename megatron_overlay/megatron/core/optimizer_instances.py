# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Ranks of each group of several distributed-optimizer instances; plain data, no processes.

With n instances the optimizer's state is sharded over 1/n of the data-parallel ranks; gradients are
reduce-scattered within an instance, then all-reduced between instances.
"""

Groups = list[list[int]]


def instance_groups(dp_cp: Groups, expt_dp: Groups | None, instances: int) -> dict[str, Groups]:
    """Ranks of the groups by field of ``ProcessGroupCollection``.

    Args:
        dp_cp: groups of ranks that hold the same dense parameters.
        expt_dp: groups of ranks that hold the same experts; None without experts.
        instances: n; each group is cut into n runs of equal length.

    Returns:
        ``intra_dp_cp`` and, with experts, ``intra_expt_dp``: the runs; ``inter_dist_opt``: ranks
        at the same place in the runs of a group; ``intra_dist_opt``: all ranks of an instance.

    Raises:
        ValueError: n does not divide the size of the groups, or dense and expert groups would put
            a rank into different instances.
    """
    result = {"intra_dp_cp": _runs(dp_cp, instances, "dp·cp")}
    between = _between(dp_cp, instances)
    if expt_dp is not None:
        result["intra_expt_dp"] = _runs(expt_dp, instances, "expt_dp")
        if _as_sets(_between(expt_dp, instances)) != _as_sets(between):
            raise ValueError(
                f"{instances} optimizer instances pair ranks {between} by their dense groups, but "
                f"{_between(expt_dp, instances)} by their expert groups: make dp the slowest dim "
                f"inside a pipeline stage, and expt_dp the slowest of the experts"
            )
    result["inter_dist_opt"] = between
    result["intra_dist_opt"] = [
        sorted(group[number] for group in between) for number in range(instances)
    ]
    return result


def _runs(groups: Groups, instances: int, what: str) -> Groups:
    length, rest = divmod(len(groups[0]), instances)
    if rest:
        raise ValueError(
            f"{instances} optimizer instances must divide {what} = {len(groups[0])} ranks"
        )
    return [
        group[start : start + length] for group in groups for start in range(0, len(group), length)
    ]


def _between(groups: Groups, instances: int) -> Groups:
    length = len(groups[0]) // instances
    return [group[place::length] for group in groups for place in range(length)]


def _as_sets(groups: Groups) -> set[frozenset[int]]:
    return {frozenset(group) for group in groups}
