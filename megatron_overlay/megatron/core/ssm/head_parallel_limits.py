# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which context-parallel sizes a layer can take when each CP rank scans a share of the heads."""

from math import gcd


def fitting_cp_sizes(heads: int, groups: int, tp_size: int) -> list[int]:
    """CP sizes, ascending, over which the heads of one TP rank can be spread.

    ``heads`` and ``groups`` are those of the whole layer; ``groups`` divides ``heads``. Each CP
    rank takes equally many heads, and either whole groups or heads of one group only, whose
    state (B and C) is then repeated on the ranks that share it. Empty where TP alone does not
    divide heads and groups.
    """
    if heads % tp_size or groups % tp_size:
        return []
    local_heads, local_groups = heads // tp_size, groups // tp_size
    return [
        cp_size
        for cp_size in range(1, local_heads + 1)
        if local_heads % cp_size == 0
        and (local_groups % cp_size == 0 or cp_size % local_groups == 0)
    ]


def check_head_parallel(heads: int, groups: int, tp_size: int, cp_size: int) -> None:
    """Refuse a layout that head-parallel Mamba cannot take; needs no process group.

    Raises:
        ValueError: naming the numbers, the broken rule, and the sizes that would fit.
    """
    fitting = fitting_cp_sizes(heads, groups, tp_size)
    if cp_size in fitting:
        return
    layer = f"a Mamba layer of {heads} heads in {groups} groups"
    if not fitting:
        common = gcd(heads, groups)
        sizes = [size for size in range(1, common + 1) if common % size == 0]
        raise ValueError(
            f"{layer} cannot be spread over tp={tp_size}, which must divide both; "
            f"tp sizes that fit: {_listing(sizes)}"
        )
    if heads % (tp_size * cp_size):
        rule = f"tp·cp = {tp_size * cp_size} must divide the heads"
    else:
        rule = f"one of cp and the {groups // tp_size} groups of a TP rank must divide the other"
    raise ValueError(
        f"{layer} cannot be spread over tp={tp_size}, cp={cp_size}: {rule}; "
        f"cp sizes that fit with tp={tp_size}: {_listing(fitting)}"
    )


def check_gated_delta_net(key_heads: int, value_heads: int, tp_size: int, cp_size: int) -> None:
    """Refuse a layout over which a gated delta net cannot spread its heads.

    Raises:
        ValueError: naming the numbers, the rule, and the CP sizes that would fit.
    """
    common = gcd(key_heads, value_heads)
    if common % (tp_size * cp_size):
        fitting = [n for n in range(1, common + 1) if common % (tp_size * n) == 0]
        raise ValueError(
            f"a gated delta net of {key_heads} key and {value_heads} value heads cannot be spread "
            f"over tp={tp_size}, cp={cp_size}: tp·cp = {tp_size * cp_size} must divide both; "
            f"cp sizes that fit with tp={tp_size}: {_listing(fitting) or 'none'}"
            + ("; state passing takes any" if fitting else "")
        )


def _listing(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
