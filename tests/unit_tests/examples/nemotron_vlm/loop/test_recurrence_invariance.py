# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The model with Mamba-2, gated delta net, attention and expert layers: every way of context
parallelism in its recurrent layers gives one rank's losses and gradient norms."""

import pytest

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.options.arguments import parse
from tests.unit_tests.examples.nemotron_vlm.runs import assert_same_trajectory_as_one_rank
from tests.unit_tests.test_utilities import requires_world_size

TINY_GDN = ("--model", "tiny-gdn")
CONTIGUOUS = ("--linear-cp-mode", "chunkwise", "--linear-cp-layout", "contiguous")
ZIGZAG = ("--linear-cp-mode", "chunkwise", "--linear-cp-layout", "zigzag")
HEADS = ("--linear-cp-mode", "headwise")


@requires_world_size(4)
class TestFourRanks:
    @pytest.mark.parametrize(
        ("language", "options"),
        [
            pytest.param("cp=4,dp=1,ep=2", CONTIGUOUS, id="cp-4-contiguous"),
            pytest.param("tp=2,cp=2,dp=1", CONTIGUOUS, id="sequence-parallel-contiguous"),
            pytest.param("tp=2,cp=2,dp=1", ZIGZAG, id="sequence-parallel-zigzag"),
            pytest.param("cp=2,pp=2,vpp=2,dp=1", CONTIGUOUS, id="virtual-stages-contiguous"),
        ],
    )
    def test_trajectory_equals_one_rank(self, language, options):
        assert_same_trajectory_as_one_rank("tp=2", language, *options, common=TINY_GDN)


@requires_world_size(2)
class TestTwoRanks:
    @pytest.mark.parametrize("options", [CONTIGUOUS, ZIGZAG, HEADS], ids="/".join)
    def test_trajectory_equals_one_rank(self, options):
        assert_same_trajectory_as_one_rank("tp=2", "cp=2,dp=1", *options, common=TINY_GDN)


@requires_world_size(8)
class TestEightRanks:
    def test_trajectory_equals_one_rank(self):
        layouts = "tp=4", "cp=2,pp=2,dp=2,ep=2"
        assert_same_trajectory_as_one_rank(*layouts, *CONTIGUOUS, common=TINY_GDN)


class TestOptions:
    def test_contiguous_tokens_with_spread_heads_are_refused(self):
        arguments = [*HEADS, "--linear-cp-layout", "contiguous"]
        with pytest.raises(UserError, match="contiguous"):
            parse(arguments, world_size=1)
