# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Layouts: rules, and what the refusals propose; no process needed."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import (
    COLOCATED,
    NON_COLOCATED,
    Batch,
    Layout,
    Layouts,
    parse_layout,
)
from examples.mimo.nemotron_vlm.model.presets import VLMPreset, tiny, tiny_gdn
from examples.mimo.nemotron_vlm.options.layout_rules import derive, ranks_of_modules, violation

BATCH = Batch(global_size=32, micro_size=4, seq_length=32)


def resolve(
    encoders: Sequence[Layout],
    language: Layout,
    batch: Batch,
    world: int,
    preset: VLMPreset,
    placement: str = COLOCATED,
) -> Layouts:
    """Complete layouts as a run does; a broken rule raises UserError."""
    layouts = derive(encoders, language, batch, world, placement)
    ranks = ranks_of_modules(encoders, language, world, placement)
    if broken := violation(layouts, ranks, preset):
        raise UserError(broken)
    return layouts


def resolved(
    encoder: str, language: str, world: int, batch: Batch = BATCH, placement: str = COLOCATED
) -> Layouts:
    parsed = [parse_layout(encoder, "encoder")], parse_layout(language, "language")
    return resolve(*parsed, batch, world, tiny(), placement)


class TestRules:
    @pytest.mark.parametrize(
        ("encoder", "language", "world", "text"),
        [
            ("tp=3", "tp=1", 3, "tp=3 must divide the 8 attention heads"),
            ("tp=2,dp=4", "tp=1", 4, "= 8 must equal the 4 ranks"),
            ("tp=1", "tp=8", 8, "tp=8 must divide the 4 query groups"),
            ("cp=2", "tp=1", 4, "an encoder takes tp and dp only"),
            ("tp=1", "tp=1,ep=3", 3, "ep=3 must divide the 8 experts"),
            ("tp=1", "tp=2,dp=2,ep=8", 4, "must divide tp·cp·dp = 4"),
            ("tp=1", "pp=3", 3, "must divide the 8 layers"),
            ("tp=1", "dp=3", 3, "global batch 32 must be a multiple of micro batch × dp"),
            ("tp=1", "cp=32", 32, "sequence length 32 must be a multiple of 64"),
            ("dp=8", "tp=1", -8, "leave 8 for images and 0 for language of 8 ranks; each"),
            ("tp=1", "dp=8", -8, "leave 0 for images and 8 for language of 8 ranks; each"),
            ("dp=2", "dp=4", -8, "= 4 must equal the 6 ranks"),
            ("pp=4,dp=1", "dp=4", -8, "pp=4 must divide the 2 layers"),
            ("cp=2", "dp=4", -8, "takes tp and dp only (and pp with --placement non-colocated)"),
            ("dp=4", "pp=2,vpp=2,dp=2", -8, "vpp=2 needs --placement colocated"),
            ("pp=2", "cp=2", -8, "multiple of micro batch × dp = 4·3"),
            ("dp=3", "dp=4", -7, "encoder dp=3 and language dp=4 must divide the other: "),
            ("dp=8", "dp=1", -9, "encoder dp=8 must divide the 4 samples of a microbatch"),
        ],
    )
    def test_names_the_numbers_and_the_rule(self, encoder, language, world, text):
        """The world is negative where the modules have ranks of their own."""
        placement = COLOCATED if world > 0 else NON_COLOCATED
        with pytest.raises(UserError) as refusal:
            resolved(encoder, language, abs(world), placement=placement)
        assert text in str(refusal.value)
        assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize(
        ("preset", "sizes", "text"),
        [
            (tiny(), {"mamba_num_groups": 2}, "tp=4 must divide the 2 Mamba groups"),
            (tiny_gdn(), {"linear_num_key_heads": 6}, "tp=4 must divide the 6 key heads"),
        ],
    )
    def test_recurrent_layers_limit_tp_but_not_cp(self, preset, sizes, text):
        preset = replace(preset, language=replace(preset.language, **sizes))
        batch = Batch(global_size=32, micro_size=4, seq_length=96)
        with pytest.raises(UserError, match=text):
            resolve([Layout()], parse_layout("tp=4", "language"), batch, 4, preset)
        resolve([Layout()], parse_layout("cp=3", "language"), batch, 3, preset)

    @pytest.mark.parametrize("asked", ["tp=8", "tp=2,pp=2,dp=3,ep=4,etp=1,vpp=2"])
    def test_proposes_layouts_that_fit_with_the_expert_and_virtual_sizes(self, asked):
        with pytest.raises(UserError) as refusal:
            resolved("tp=1", asked, 8)
        proposals = str(refusal.value).split("Nearest that fit: ")[1].split()
        assert proposals
        for proposal in proposals:
            resolved("tp=1", proposal, 8)
        nearest, wanted = parse_layout(proposals[0], "x"), parse_layout(asked, "x")
        assert (nearest.etp, nearest.vpp) == (wanted.etp, wanted.vpp)


@pytest.mark.parametrize("text", ["tp", "tp=0", "tp=two", "xp=2", "tp=-1", "tp=2,tp=2"])
def test_refuses_what_is_no_layout(text):
    with pytest.raises(UserError, match="--language"):
        parse_layout(text, "language")
