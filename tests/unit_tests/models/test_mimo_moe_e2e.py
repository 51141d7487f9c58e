# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""MIMO models with experts, on the groups of two grids alone, train like one rank."""

import gc

import pytest

from examples.mimo.nemotron_vlm.placement import COLOCATED, NON_COLOCATED
from megatron.core import parallel_state
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from tests.unit_tests.models import mimo_models
from tests.unit_tests.models.mimo_models import make_options, one_rank
from tests.unit_tests.models.mimo_training import (
    ADAM,
    expert_shard,
    modules_of,
    modules_of_one_rank,
    process_groups,
    train,
)
from tests.unit_tests.test_utilities import Utils, requires_world_size

WORLD = 8
STEPS = 5
RTOL = 1e-4
"""For fp32 losses and gradient norms, which are sums in another order."""


@requires_world_size(WORLD)
class TestTrainsLikeOneRank:
    """Loss and gradient norm of each step, and every shard of the experts after the first."""

    def setup_method(self, method):
        Utils.initialize_distributed()
        self.groups_before = process_groups()

    def teardown_method(self, method):
        assert process_groups() == self.groups_before
        assert not parallel_state.is_initialized()
        assert parallel_state._GLOBAL_MEMORY_BUFFER is None

    @classmethod
    def teardown_class(cls):
        gc.collect()  # a model is a cycle; it keeps its groups

    @pytest.mark.parametrize(
        ("build", "encoder", "language"),
        [
            ("build_plain_moe_gpt", "tp=4,dp=2", "tp=2,dp=4,ep=4,etp=1"),
            ("build_plain_moe_gpt", "tp=1,dp=8", "tp=2,dp=4,ep=2,etp=2"),
            ("build_nemotron_moe_gpt", "tp=2,dp=4", "tp=2,cp=2,dp=2,ep=4,etp=1"),
            ("build_mamba_moe", "tp=1,dp=8", "tp=2,dp=4,ep=2,etp=2"),
            ("build_radio_mamba_moe", "tp=4,dp=2", "tp=1,cp=2,dp=4,ep=4,etp=2"),
        ],
    )
    def test_colocated(self, build, encoder, language):
        self.assert_trains_like_one_rank(build, encoder, language, COLOCATED)

    @pytest.mark.parametrize(
        ("build", "encoder", "language"),
        [
            ("build_nemotron_moe_gpt", "tp=2,dp=2", "tp=2,dp=2,ep=4,etp=1"),
            ("build_radio_mamba_moe", "tp=1,dp=4", "cp=2,dp=2,ep=2,etp=2"),
        ],
    )
    def test_non_colocated(self, build, encoder, language):
        self.assert_trains_like_one_rank(build, encoder, language, NON_COLOCATED)

    def assert_trains_like_one_rank(self, build, encoder, language, placement):
        build = getattr(mimo_models, build)
        with modules_of_one_rank() as modules:
            expected = train(build, one_rank(), modules, STEPS)
        options = make_options(encoder, language, WORLD, placement=placement)
        with modules_of(options) as modules:
            run = train(build, options, modules, STEPS)
            groups = modules[LANGUAGE].groups

            assert run.losses == pytest.approx(expected.losses, rel=RTOL)
            assert run.grad_norms == pytest.approx(expected.grad_norms, rel=RTOL)
            if groups is None:
                return
            assert len(run.experts) * groups.ep.size() == len(expected.experts) > 0
            for name, part in run.experts.items():
                whole = expert_shard(expected.experts[name], part, groups)
                # Adam's steps are of the size of lr.
                error = (part - whole).abs().max().item()
                assert error <= RTOL * ADAM.lr, name
