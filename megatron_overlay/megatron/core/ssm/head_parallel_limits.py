# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tensor- and context-parallel sizes over which a recurrent layer's heads can be split."""

from math import gcd


def mamba_cp_sizes(heads: int, groups: int, tp_size: int) -> list[int]:
    """CP sizes, ascending, over which the heads of one TP rank of a Mamba layer can be split.

    ``heads`` and ``groups`` are those of the whole layer; ``groups`` divides ``heads``. Each CP
    rank takes equally many heads, and either whole groups or heads of a single group, whose B and C
    are then repeated on the ranks that share it. The list is empty if ``tp_size`` does not divide
    heads and groups.
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


def check_mamba(heads: int, groups: int, tp_size: int, cp_size: int) -> None:
    """Refuse sizes over which a Mamba layer's heads cannot be split; needs no process group.

    Args:
        cp_size: number of CP ranks over which the heads of a TP rank are split; 1 with state
            passing.

    Raises:
        ValueError: the sizes do not fit; the message names the rule and the sizes that would fit.
    """
    if heads % (tp_size * cp_size):
        rule = f"tp·cp = {tp_size * cp_size} must divide the heads"
    elif groups % tp_size:
        rule = f"tp = {tp_size} must divide the groups"
    else:
        rule = f"one of cp and the {groups // tp_size} groups of a TP rank must divide the other"
    layer = f"a Mamba layer of {heads} heads in {groups} groups"
    _check(layer, rule, mamba_cp_sizes(heads, groups, tp_size), tp_size, cp_size)


def check_gated_delta_net(key_heads: int, value_heads: int, tp_size: int, cp_size: int) -> None:
    """Refuse sizes over which a gated delta net's heads cannot be split.

    Each CP rank takes equally many key heads, and equally many value heads.
    """
    layer = f"a gated delta net of {key_heads} key and {value_heads} value heads"
    rule = f"tp·cp = {tp_size * cp_size} must divide both"
    common = gcd(key_heads, value_heads)
    _check(layer, rule, mamba_cp_sizes(common, common, tp_size), tp_size, cp_size)


def _check(layer: str, rule: str, fitting: list[int], tp_size: int, cp_size: int) -> None:
    if cp_size not in fitting:
        raise ValueError(
            f"{layer} cannot be spread over tp={tp_size}, cp={cp_size}: {rule}; cp sizes that fit "
            f"with tp={tp_size}: {', '.join(map(str, fitting)) or 'none'}"
            + ("; state passing takes any" if fitting else "")
        )
