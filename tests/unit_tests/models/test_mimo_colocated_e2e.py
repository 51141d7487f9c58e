# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Colocated training of encoders and a GPT whose layouts differ, against plain PyTorch."""

import contextlib
import functools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from tests.unit_tests.models.mimo_gpt import IMAGES, SOUNDS, Module
from tests.unit_tests.models.mimo_gpt_samples import draw
from tests.unit_tests.models.mimo_gpt_training import Job, Steps, train, train_plainly
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.test_utilities import Utils, requires_world_size

STEPS = 5

EVEN = Job([draw({IMAGES: 3}, seed) for seed in range(16)])
UNEVEN = Job([draw({IMAGES: seed * 5 % 7}, seed) for seed in range(16)])
"""Zero to six patches a sample."""

TEXT_ONLY_PART = Job([draw({IMAGES: 3 if 4 <= seed < 8 else 0}, seed) for seed in range(16)])
"""With two microbatches or four, one at least has no image on any rank."""

TEXT_ONLY = Job([draw({IMAGES: 0}, seed) for seed in range(16)])
TWO_ENCODERS = Job([draw({IMAGES: seed % 4, SOUNDS: seed % 3}, seed) for seed in range(16)])
PACKED = Job([draw({IMAGES: s % 3}, s, length=3 + 7 * s % 11) for s in range(16)], packed=True)

LIKE_LENGTHS = Job(
    [
        replace(sample, loss_mask=torch.ones_like(sample.loss_mask))
        for sample in (draw({IMAGES: seed % 4}, seed, length=12) for seed in range(16))
    ]
)
"""The mean of the ranks' means is that of all tokens."""
TOLD = Job([draw({IMAGES: seed * 5 % 7}, seed, length=12) for seed in range(16)])
"""Samples of a length that CP divides."""

TOLERANCE = 1e-5
"""Relative, of fp32 losses and gradient norms: sums in another order."""


@contextlib.contextmanager
def modules(**layouts: dict[str, int]):
    """Modules over the ranks, by name; their groups end with the block."""
    Utils.initialize_distributed()
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    made = {name: Module.make(**layout) for name, layout in layouts.items()}
    model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
    yield made
    for module in made.values():
        module.grid.destroy()


@functools.cache
def one_rank_trajectory(job: Job) -> Steps:
    """Rank 0 trains alone, in plain PyTorch; the others wait for it."""
    with modules(**{LANGUAGE: {}, **{name: {} for name in job.modalities}}) as made:
        found = [None]
        if Utils.rank == 0:
            found = [train_plainly(job, made, STEPS)]
        dist.broadcast_object_list(found)
    return found[0]


def check(
    job: Job, language: dict[str, int], told: bool = False, **encoders: dict[str, int]
) -> None:
    """The loss goes down, step by step as on one rank."""
    expected_losses, expected_norms = zip(*one_rank_trajectory(job), strict=True)
    with modules(**{LANGUAGE: language, **encoders}) as made:
        losses, norms = zip(*train(job, made, STEPS, told), strict=True)
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE)
    assert norms == pytest.approx(expected_norms, rel=TOLERANCE)
    assert losses[-1] < 0.98 * losses[0]


class TestOneRank:
    @requires_world_size(1)
    @pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
    def test_the_loss_falls_as_in_plain_pytorch(self, packed):
        check(replace(EVEN, packed=packed), {}, images={})


class TestTwoRanks:
    @requires_world_size(2)
    @pytest.mark.parametrize("language", [dict(tp=2), dict(pp=2)], ids=str)
    def test_grids_without_a_cp_dim(self, language):
        check(UNEVEN, language | dict(cp=None), images=dict(dp=2, cp=None))


class TestFourRanks:
    @requires_world_size(4)
    @pytest.mark.parametrize("language", [dict(cp=2, dp=2), dict(cp=2, pp=2)], ids=str)
    @pytest.mark.parametrize("encoder", [dict(dp=4), dict(tp=4)], ids=["fan-in", "fan-out"])
    def test_the_host_waits_for_nothing_once_a_batch_tells_its_tokens(self, encoder, language):
        """Encoders, bridge, schedule and MimoModel, backward and reduction of gradients included.

        The first step fills caches, of layouts and of attention.
        """
        language = language | {"variable_lengths": False}  # else stages tell each other shapes
        with modules(images=encoder, language=language) as made:
            train(TOLD, made, 3, told=True, around=lambda n: no_host_sync() if n else nullcontext())


class TestEightRanks:
    @requires_world_size(8)
    @pytest.mark.parametrize(
        ("encoder", "language", "packed"),
        [
            pytest.param(dict(dp=8), dict(tp=2, dp=4), False, id="fan-in"),
            pytest.param(dict(tp=8), dict(tp=2, dp=4), False, id="fan-out"),
            pytest.param(dict(dp=8), dict(cp=2, dp=4), False, id="fan-in-cp-2"),
            pytest.param(dict(dp=8), dict(tp=2, cp=2, dp=2), True, id="fan-in-cp-2-tp-2-packed"),
            pytest.param(dict(tp=4, dp=2), dict(cp=2, dp=4), False, id="fan-out-cp-2"),
            pytest.param(dict(tp=8), dict(cp=4, dp=2), True, id="fan-out-cp-4-packed"),
        ],
    )
    def test_the_loss_falls_as_on_one_rank(self, encoder, language, packed):
        check(replace(EVEN, packed=packed), language, images=encoder)


class TestWhatRealBatchesBring:
    """Each with a pipeline, most also without."""

    FAN_IN, FAN_OUT = dict(dp=8), dict(tp=8)
    CP_2_PP_2 = dict(cp=2, pp=2, dp=2)
    VPP_2 = dict(tp=2, pp=2, vpp=2, dp=2)

    @requires_world_size(8)
    @pytest.mark.parametrize("language", [dict(cp=2, dp=4), CP_2_PP_2, VPP_2], ids=str)
    @pytest.mark.parametrize("encoder", [FAN_IN, FAN_OUT], ids=["fan-in", "fan-out"])
    def test_another_number_of_patches_in_each_sample(self, encoder, language):
        check(UNEVEN, language, images=encoder)

    @requires_world_size(8)
    @pytest.mark.parametrize("language", [dict(cp=2, dp=4), CP_2_PP_2, VPP_2], ids=str)
    @pytest.mark.parametrize("encoder", [FAN_IN, FAN_OUT], ids=["fan-in", "fan-out"])
    def test_a_microbatch_without_images(self, encoder, language):
        check(replace(TEXT_ONLY_PART, microbatches=4), language, images=encoder)

    @requires_world_size(8)
    @pytest.mark.parametrize("language", [dict(cp=2, dp=4), CP_2_PP_2], ids=str)
    def test_a_batch_without_images(self, language):
        check(TEXT_ONLY, language, images=self.FAN_IN)

    @requires_world_size(8)
    @pytest.mark.parametrize("language", [dict(tp=2, cp=2, dp=2), CP_2_PP_2, VPP_2], ids=str)
    @pytest.mark.parametrize("told", [False, True], ids=["read-back", "told"])
    def test_two_encoders_of_different_layouts(self, language, told):
        check(TWO_ENCODERS, language, told, images=dict(tp=2, dp=4), sounds=self.FAN_IN)

    @requires_world_size(8)
    @pytest.mark.parametrize("language", [CP_2_PP_2, VPP_2], ids=str)
    @pytest.mark.parametrize("encoder", [FAN_IN, FAN_OUT], ids=["fan-in", "fan-out"])
    @pytest.mark.parametrize("told", [False, True], ids=["read-back", "told"])
    def test_packed_samples_of_odd_lengths(self, encoder, language, told):
        check(PACKED, language, told, images=encoder)

    @requires_world_size(8)
    @pytest.mark.parametrize("language", [CP_2_PP_2, VPP_2], ids=str)
    def test_tied_embeddings(self, language):
        check(replace(UNEVEN, tied=True), language, images=self.FAN_OUT)

    @requires_world_size(8)
    @pytest.mark.parametrize("frozen", [IMAGES, LANGUAGE])
    @pytest.mark.parametrize("language", [dict(cp=2, dp=4), CP_2_PP_2, VPP_2], ids=str)
    def test_a_frozen_module(self, language, frozen):
        check(replace(UNEVEN, frozen=(frozen,)), language, images=self.FAN_IN)

    @requires_world_size(8)
    @pytest.mark.parametrize("microbatches", [1, 4])
    def test_fewer_microbatches_than_stages_and_more(self, microbatches):
        check(replace(UNEVEN, microbatches=microbatches), self.CP_2_PP_2, images=self.FAN_IN)

    @requires_world_size(4)
    @pytest.mark.parametrize("job", [TEXT_ONLY_PART, UNEVEN], ids=["text-only-part", "uneven"])
    @pytest.mark.parametrize("language", [dict(cp=2, dp=2), dict(pp=2, dp=2)], ids=str)
    def test_gradients_reduced_during_the_backward(self, language, job):
        check(replace(job, microbatches=2, overlap=True), language, images=dict(dp=4))

    @requires_world_size(4)
    @pytest.mark.parametrize("job", [TEXT_ONLY_PART, UNEVEN], ids=["text-only-part", "uneven"])
    @pytest.mark.parametrize("encoder", [dict(dp=4), dict(tp=4)], ids=str)
    def test_images_of_two_microbatches_at_once(self, encoder, job):
        job = replace(job, microbatches=4, macro_batch=2, overlap=True)
        check(job, dict(cp=2, dp=2), images=encoder)

    @requires_world_size(4)
    @pytest.mark.parametrize("encoder", [dict(dp=4), dict(tp=4)], ids=str)
    @pytest.mark.parametrize("language", [dict(cp=2, dp=2), dict(pp=2, dp=2)], ids=str)
    def test_a_loss_that_is_a_mean_of_means(self, language, encoder):
        check(replace(LIKE_LENGTHS, per_token=False), language, images=encoder)
