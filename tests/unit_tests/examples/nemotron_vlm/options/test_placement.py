# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Non-colocated modules: who gets how many ranks, what is refused, who takes which samples."""

import pytest

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import (
    NON_COLOCATED,
    Batch,
    Layouts,
    layout_table,
    parse_layout,
)
from examples.mimo.nemotron_vlm.model.presets import tiny
from examples.mimo.nemotron_vlm.options.layout_rules import resolve


def non_colocated(encoder: str, language: str, world: int) -> Layouts:
    parsed = parse_layout(encoder, "encoder"), parse_layout(language, "language")
    return resolve(*parsed, Batch(32, 4, 32), world, tiny(), NON_COLOCATED)


class TestRanks:
    @pytest.mark.parametrize(
        ("encoder", "language", "dp"),
        [
            ("tp=2,dp=2", "tp=2", (2, 2)),
            ("tp=2", "tp=2,dp=2", (2, 2)),
            ("pp=2", "cp=2", (1, 3)),
            ("pp=2,dp=2", "pp=2,cp=2", (2, 1)),
        ],
    )
    def test_dp_is_derived_from_what_the_other_module_leaves(self, encoder, language, dp):
        if dp == (1, 3):  # 32 samples are no multiple of 4 × 3
            with pytest.raises(UserError, match="multiple of micro batch × dp = 4·3"):
                non_colocated(encoder, language, 8)
            return
        layouts = non_colocated(encoder, language, 8)
        assert (layouts.encoder.dp, layouts.language.dp) == dp
        assert layouts.language_offset == layouts.encoder.size

    @pytest.mark.parametrize(
        ("encoder", "language", "world", "text"),
        [
            (
                "dp=8",
                "tp=1",
                8,
                "--encoder takes 8 of 8 ranks and leaves none for the language model",
            ),
            ("tp=1", "dp=8", 8, "--language takes 8 of 8 ranks and leaves none for the encoder"),
            ("dp=2", "dp=4", 8, "= 4 must equal the 6 ranks"),
            ("pp=4,dp=1", "dp=4", 8, "pp=4 must divide the 2 layers"),
            ("cp=2", "dp=4", 8, "takes tp and dp only (and pp with --placement non-colocated)"),
            ("dp=4", "pp=2,vpp=2,dp=2", 8, "vpp=2 needs --placement colocated"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, encoder, language, world, text):
        with pytest.raises(UserError) as refusal:
            non_colocated(encoder, language, world)
        assert text in str(refusal.value)
        assert "\n" not in str(refusal.value)

    def test_the_table_shows_the_ranks_of_each_module(self):
        assert layout_table(non_colocated("pp=2,dp=2", "pp=2,cp=2", 8)).splitlines() == [
            "module    layout               ranks  stages",
            "encoder   tp=1,pp=2,dp=2       0-3    2",
            "language  tp=1,cp=2,pp=2,dp=1  4-7    2",
        ]
