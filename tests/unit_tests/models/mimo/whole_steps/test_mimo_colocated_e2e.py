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
from megatron.core.models.mimo.setup.teardown import destroy
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from tests.unit_tests.models.mimo.mimo_gpt import IMAGES, SOUNDS, Module
from tests.unit_tests.models.mimo.mimo_gpt_samples import draw
from tests.unit_tests.models.mimo.mimo_gpt_training import Job, Steps, train, train_plainly
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.test_utilities import Utils, requires_world_size

STEPS = 3

EVEN = Job(tuple(draw({IMAGES: 3}, seed) for seed in range(16)))
UNEVEN = Job(tuple(draw({IMAGES: seed * 5 % 7}, seed) for seed in range(16)))
"""Zero to six patches a sample."""

TEXT_ONLY_PART = Job(tuple(draw({IMAGES: 3 if 4 <= s < 8 else 0}, s) for s in range(16)))
"""With two microbatches or four, one at least has no image on any rank."""

TEXT_ONLY = Job(tuple(draw({IMAGES: 0}, seed) for seed in range(16)))
TWO_ENCODERS = Job(tuple(draw({IMAGES: seed % 4, SOUNDS: seed % 3}, seed) for seed in range(16)))
PACKED = Job(tuple(draw({IMAGES: s % 3}, s, length=3 + 7 * s % 11) for s in range(16)), packed=True)

LIKE_LENGTHS = Job(
    tuple(
        replace(sample, loss_mask=torch.ones_like(sample.loss_mask))
        for sample in (draw({IMAGES: seed % 4}, seed, length=12) for seed in range(16))
    )
)
"""The mean of the ranks' means is that of all tokens."""
DIVISIBLE = Job(tuple(draw({IMAGES: seed * 5 % 7}, seed, length=12) for seed in range(16)))
"""Samples of a length that CP divides."""

TOLERANCE = 1e-5
"""Relative tolerance of fp32 losses and gradient norms: sums in another order."""


@contextlib.contextmanager
def modules(**layouts: dict[str, int]):
    """Modules over the ranks, by name; their groups end with the block."""
    Utils.initialize_distributed()
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    made = {name: Module.make(**layout) for name, layout in layouts.items()}
    model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
    yield made
    destroy([], made)


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
    job: Job, language: dict[str, int], planned: bool = True, **encoders: dict[str, int]
) -> None:
    """Assert that the loss goes down, step by step as on one rank."""
    expected = one_rank_trajectory(job.on_one_rank())
    expected_losses, expected_norms = zip(*expected, strict=True)
    with modules(**{LANGUAGE: language, **encoders}) as made:
        losses, norms = zip(*train(job, made, STEPS, planned), strict=True)
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE)
    assert norms == pytest.approx(expected_norms, rel=TOLERANCE)
    assert losses[-1] < 0.995 * losses[0]


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
    def test_the_host_waits_for_nothing_once_a_batch_brings_a_plan(self, encoder, language):
        """Encoders, bridge, schedule and MimoModel, backward and reduction of gradients included.

        The first step fills caches, of layouts and of attention.
        """
        language = language | {"variable_lengths": False}  # else stages tell each other shapes
        with modules(images=encoder, language=language) as made:
            train(DIVISIBLE, made, 3, around=lambda n: no_host_sync() if n else nullcontext())


@requires_world_size(8)
class TestEightRanks:
    """Several DP ranks of both modules, which four ranks with CP and a pipeline leave no room for.

    The samples differ in their number of patches.
    """

    @pytest.mark.parametrize(
        ("encoder", "language", "job"),
        [
            pytest.param(dict(dp=8), dict(cp=2, pp=2, dp=2), UNEVEN, id="fan-in-cp-pp"),
            pytest.param(dict(tp=4, dp=2), dict(pp=2, vpp=2, dp=4), UNEVEN, id="fan-out-vpp"),
            pytest.param(dict(dp=8), dict(tp=2, cp=2, dp=2), PACKED, id="fan-in-cp-tp-packed"),
            pytest.param(dict(tp=8), dict(cp=4, dp=2), PACKED, id="fan-out-cp-4-packed"),
            pytest.param(dict(tp=8), dict(tp=2, dp=4), EVEN, id="fan-out-tp"),
        ],
    )
    def test_the_loss_falls_as_on_one_rank(self, encoder, language, job):
        check(job, language, images=encoder)


FAN_IN, FAN_OUT = dict(dp=4), dict(tp=4)
CP_2_PP_2, VPP_2 = dict(cp=2, pp=2), dict(pp=2, vpp=2, dp=2)
LAYOUTS = [(FAN_IN, CP_2_PP_2), (FAN_OUT, VPP_2), (FAN_OUT, dict(cp=2, dp=2))]
"""Layouts of the encoder and the language model; pipelines come first."""


@requires_world_size(4)
class TestWhatRealBatchesBring:
    """Each test runs with a pipeline, most also with virtual stages and without a pipeline."""

    @pytest.mark.parametrize(("encoder", "language"), LAYOUTS, ids=str)
    def test_a_microbatch_without_images(self, encoder, language):
        check(replace(TEXT_ONLY_PART, microbatches=4), language, images=encoder)

    @pytest.mark.parametrize(("encoder", "language"), LAYOUTS, ids=str)
    @pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
    def test_equal_samples_need_no_plan(self, packed, encoder, language):
        check(replace(EVEN, packed=packed), language, planned=False, images=encoder)

    @pytest.mark.parametrize(("encoder", "language"), LAYOUTS[:2], ids=str)
    def test_unequal_samples_without_a_plan_are_refused_on_every_rank(self, encoder, language):
        with modules(**{LANGUAGE: language, IMAGES: encoder}) as made:
            with pytest.raises(ValueError, match="equal parts of a batch must have .* batch_plan"):
                train(UNEVEN, made, 1, planned=False)

    @pytest.mark.parametrize(("encoder", "language"), LAYOUTS[::2], ids=str)
    def test_a_batch_without_images(self, encoder, language):
        check(TEXT_ONLY, language, images=encoder)

    @pytest.mark.parametrize(("encoder", "language"), LAYOUTS, ids=str)
    def test_two_encoders_of_different_layouts(self, encoder, language):
        check(TWO_ENCODERS, language, images=dict(tp=2, dp=2), sounds=encoder)

    @pytest.mark.parametrize(("encoder", "language"), LAYOUTS[:2], ids=str)
    def test_packed_samples_of_odd_lengths(self, encoder, language):
        check(PACKED, language, images=encoder)

    @pytest.mark.parametrize(("encoder", "language"), LAYOUTS[:2], ids=str)
    def test_tied_embeddings(self, encoder, language):
        check(replace(UNEVEN, tied=True), language, images=encoder)

    @pytest.mark.parametrize("frozen", [IMAGES, LANGUAGE])
    @pytest.mark.parametrize(("encoder", "language"), LAYOUTS[::2], ids=str)
    def test_a_frozen_module(self, encoder, language, frozen):
        check(replace(UNEVEN, frozen=(frozen,)), language, images=encoder)

    @pytest.mark.parametrize("microbatches", [1, 4])
    def test_fewer_microbatches_than_stages_and_more(self, microbatches):
        check(replace(UNEVEN, microbatches=microbatches), CP_2_PP_2, images=FAN_IN)

    @pytest.mark.parametrize("language", [dict(cp=2, dp=2), dict(pp=2, dp=2)], ids=str)
    def test_gradients_reduced_during_the_backward(self, language):
        check(replace(TEXT_ONLY_PART, overlap=True), language, images=dict(dp=4))

    @pytest.mark.parametrize(
        ("encoder", "job"), [(FAN_IN, TEXT_ONLY_PART), (FAN_OUT, UNEVEN)], ids=["fan-in", "fan-out"]
    )
    def test_images_of_two_microbatches_at_once(self, encoder, job):
        job = replace(job, microbatches=4, macro_batch=2, overlap=True)
        check(job, dict(cp=2, dp=2), images=encoder)

    @pytest.mark.parametrize(
        ("encoder", "language"), [(FAN_IN, dict(pp=2, dp=2)), (FAN_OUT, dict(cp=2, dp=2))], ids=str
    )
    def test_a_loss_that_is_a_mean_of_means(self, language, encoder):
        check(replace(LIKE_LENGTHS, per_token=False), language, images=encoder)
