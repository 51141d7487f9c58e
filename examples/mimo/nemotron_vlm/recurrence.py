# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""How the language model's recurrent layers use context parallelism, and what limits it."""

from __future__ import annotations

from dataclasses import dataclass

from examples.mimo.nemotron_vlm.presets import LanguagePreset


@dataclass(frozen=True)
class Recurrence:
    """What context parallelism does in the language model's recurrent layers.

    Attributes:
        mode: ``"state-passing"`` between ranks that have all heads, or ``"head-parallel"``.
        tokens: ``"contiguous"`` except around attention layers, or ``"zigzag"`` except around
            recurrent ones; heads are spread from zigzag tokens.
    """

    mode: str = "state-passing"
    tokens: str = "contiguous"

    def rules(self, tp: int, cp: int, preset: LanguagePreset) -> list[tuple[bool, str]]:
        """(broken, what it says) of each rule on the heads of recurrent layers."""
        remedy = "; --cp-linear state-passing takes any cp" if cp > 1 else ""
        spread = 1 if self.mode == "state-passing" else cp
        rules = []
        if "G" in preset.pattern:
            heads = {
                "GDN key heads": preset.gdn_key_heads,
                "GDN value heads": preset.gdn_value_heads,
            }
            for what, n in heads.items():
                rules.append((n % tp > 0, f"tp={tp} must divide the {n} {what}"))
                text = f"tp·cp = {tp * spread} must divide the {n} {what}{remedy}"
                rules.append((n % (tp * spread) > 0, text))
        if "M" in preset.pattern and spread > 1:
            # Not at the top: it loads torch, which bad input need not wait for.
            from megatron.core.ssm.head_parallel_limits import fitting_cp_sizes

            sizes = fitting_cp_sizes(preset.mamba_heads, preset.mamba_groups, tp)
            text = (
                f"cp={cp} must be one of {sizes} to split the {preset.mamba_heads} Mamba heads "
                f"and {preset.mamba_groups} groups at tp={tp}{remedy}"
            )
            rules.append((cp not in sizes, text))
        return rules
