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
        """(broken, what it says) of each rule on the heads of recurrent layers."""
        p, rules = preset, []
        if "G" in p.pattern:
            for n, what in ((p.gdn_key_heads, "key"), (p.gdn_value_heads, "value")):
                rules.append((n % tp > 0, f"tp={tp} must divide the {n} GDN {what} heads"))
        if self.mode == "state-passing" or cp == 1:
            return rules
        # Not at the top: it loads torch, which bad input need not wait for.
        from megatron.core.ssm.head_parallel_limits import gated_delta_net_cp_sizes, mamba_cp_sizes

        def split(what: str, sizes: list[int]) -> tuple[bool, str]:
            return cp not in sizes, (
                f"cp={cp} must be one of {sizes} to split the {what} at tp={tp}; "
                "--cp-linear state-passing takes any cp"
            )

        if "G" in p.pattern:
            what = f"{p.gdn_key_heads} key and {p.gdn_value_heads} value heads of GDN layers"
            sizes = gated_delta_net_cp_sizes(p.gdn_key_heads, p.gdn_value_heads, tp)
            rules.append(split(what, sizes))
        if "M" in p.pattern:
            what = f"{p.mamba_heads} Mamba heads and {p.mamba_groups} groups"
            rules.append(split(what, mamba_cp_sizes(p.mamba_heads, p.mamba_groups, tp)))
        return rules
