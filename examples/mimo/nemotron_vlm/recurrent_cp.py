# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What limits context parallelism in the language model's recurrent layers."""

from __future__ import annotations

from examples.mimo.nemotron_vlm.presets import LanguagePreset
from megatron.core.ssm.head_parallel_limits import check_gated_delta_net, check_mamba

STATE_PASSING = "state-passing"
"""Of ``--linear-context-parallel``; the other is ``head-parallel``."""


def recurrent_cp_rules(
    mode: str, tp: int, cp: int, language: LanguagePreset
) -> list[tuple[bool, str]]:
    """(broken, what it says) of the rules on the heads of recurrent layers.

    Args:
        mode: of ``--linear-context-parallel``: which ranks have all heads.
        tp, cp: of the language model.
        language: its sizes.
    """
    spread_over = 1 if mode == STATE_PASSING else cp
    heads = language.linear_num_key_heads, language.linear_num_value_heads
    try:
        if "M" in language.hybrid_layer_pattern:
            check_mamba(language.mamba_num_heads, language.mamba_num_groups, tp, spread_over)
        if "G" in language.hybrid_layer_pattern:
            check_gated_delta_net(*heads, tp, spread_over)
    except ValueError as refusal:
        return [(True, str(refusal))]
    return []
