# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""How the language model's recurrent layers use context parallelism, and what limits it."""

from __future__ import annotations

from dataclasses import dataclass

from examples.mimo.nemotron_vlm.presets import LanguagePreset


@dataclass(frozen=True)
class RecurrentCP:
    """What context parallelism does in the language model's recurrent layers.

    Attributes:
        mode: ``"state-passing"`` between ranks that have all heads, or ``"head-parallel"``.
        token_layout: ``"contiguous"`` except around attention layers, or ``"zigzag"`` except around
            recurrent ones; heads are spread from zigzag tokens.
    """

    mode: str = "state-passing"
    token_layout: str = "contiguous"

    def rules(self, tp: int, cp: int, preset: LanguagePreset) -> list[tuple[bool, str]]:
        """(broken, what it says) of the rules on the heads of recurrent layers."""
        # Not at the top: it loads torch, which bad input need not wait for.
        from megatron.core.ssm.head_parallel_limits import check_gated_delta_net, check_mamba

        p, spread_over = preset, cp if self.mode == "head-parallel" else 1
        try:
            if "M" in p.pattern:
                check_mamba(p.mamba_heads, p.mamba_groups, tp, spread_over)
            if "G" in p.pattern:
                check_gated_delta_net(p.gdn_key_heads, p.gdn_value_heads, tp, spread_over)
        except ValueError as refusal:
            return [(True, str(refusal))]
        return []
