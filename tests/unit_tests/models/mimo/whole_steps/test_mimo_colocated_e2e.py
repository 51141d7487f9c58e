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
from megatron.core.models.gpt import GPTModel
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.setup.teardown import destroy
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from tests.unit_tests.models.mimo.mimo_gpt import IMAGES, SOUNDS, TOKENS, Module
from tests.unit_tests.models.mimo.mimo_gpt_training import (
    Job,
    Sample,
    Steps,
    draw,
    train,
    train_plainly,
)
from tests.unit_tests.no_host_sync import no_host_sync
from tests.unit_tests.test_utilities import Utils, requires_world_size

STEPS = 3


def samples(*patches: dict[str, int], length: int = TOKENS) -> tuple[Sample, ...]:
    """One sample for each, of a length that CP does not divide."""
    return tuple(draw(counts, seed, length=length) for seed, counts in enumerate(patches))


EVEN = Job(samples(*({IMAGES: 3} for _ in range(16))))
UNEVEN = Job(samples(*({IMAGES: n * 5 % 7} for n in range(16))))
"""Zero to six patches a sample."""

TEXT_ONLY_PART = Job(samples(*({IMAGES: 3 if 4 <= n < 8 else 0} for n in range(16))))
"""With two microbatches or four, one at least has no image on any rank."""

TEXT_ONLY = Job(samples(*({IMAGES: 0} for _ in range(16))))
TWO_ENCODERS = Job(samples(*({IMAGES: n % 4, SOUNDS: n % 3} for n in range(16))))
PACKED = Job(tuple(draw({IMAGES: s % 3}, s, length=3 + 7 * s % 11) for s in range(16)), packed=True)

LIKE_LENGTHS = tuple(
    replace(sample, loss_mask=torch.ones_like(sample.loss_mask))
    for sample in samples(*({IMAGES: n % 4} for n in range(16)), length=12)
)
MEAN_OF_MEANS = Job(LIKE_LENGTHS, per_token=False)
"""The mean of the ranks' means is that of all tokens."""

TOLD = Job(samples(*({IMAGES: n * 5 % 7} for n in range(32)), length=12))
"""Samples of a length that CP divides."""

IN_BUBBLES = replace(TOLD, microbatches=8, in_bubbles=True)
TEXT_ONLY_PART_IN_BUBBLES = replace(
    IN_BUBBLES,
    samples=samples(*({IMAGES: 3 if 4 <= n < 8 else 0} for n in range(16)), length=12),
    microbatches=4,
)
TWO_ENCODERS_IN_BUBBLES = replace(
    IN_BUBBLES,
    samples=samples(*({IMAGES: n % 4, SOUNDS: n % 3} for n in range(16)), length=12),
    microbatches=4,
)

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
    """Assert that the loss goes down, step by step as on one rank.

    Stages tell each other no shapes where the encoder is in the bubbles.
    """
    if job.in_bubbles:
        language = language | {"variable_lengths": False}
    expected = one_rank_trajectory(job.on_one_rank())
    expected_losses, expected_norms = zip(*expected, strict=True)
    with modules(**{LANGUAGE: language, **encoders}) as made:
        losses, norms = zip(*train(job, made, STEPS, planned), strict=True)
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE)
    assert norms == pytest.approx(expected_norms, rel=TOLERANCE)
    assert losses[-1] < 0.995 * losses[0]


FAN_IN, FAN_OUT = dict(dp=4), dict(tp=4)
BOTH = dict(tp=2, dp=2)
CP_2_PP_2, CP_2, PP_2, PP_4 = dict(cp=2, pp=2), dict(cp=2, dp=2), dict(pp=2, dp=2), dict(pp=4)
VPP_2 = dict(pp=2, vpp=2, dp=2)


def row(ranks: int, job: Job, images: dict, language: dict, planned: bool = True, **others):
    """A job on so many ranks; layouts by module; whether batches bring a plan."""
    return ranks, job, {LANGUAGE: language, IMAGES: images, **others}, planned


ROWS = {
    "several DP ranks of both modules": [row(8, PACKED, dict(dp=8), dict(cp=2, pp=2, dp=2))],
    "one rank": [row(1, EVEN, {}, {})],
    "grids without a cp dim": [row(2, UNEVEN, dict(dp=2, cp=None), dict(tp=2, cp=None))],
    "microbatches without images": [
        row(4, replace(TEXT_ONLY_PART, microbatches=4), FAN_IN, CP_2_PP_2),
        row(4, replace(TEXT_ONLY_PART, microbatches=4), FAN_OUT, VPP_2),
        row(4, replace(TEXT_ONLY_PART, overlap=True), FAN_IN, CP_2),
        row(4, replace(TEXT_ONLY_PART, microbatches=4, macro_batch=2, overlap=True), FAN_OUT, CP_2),
        row(4, TEXT_ONLY, FAN_OUT, CP_2),
    ],
    "equal samples without a plan": [
        row(4, replace(EVEN, packed=True), FAN_IN, CP_2_PP_2, planned=False),
        row(4, EVEN, FAN_OUT, CP_2, planned=False),
    ],
    "two encoders of different layouts": [
        row(4, TWO_ENCODERS, BOTH, CP_2_PP_2, sounds=FAN_IN),
        row(4, TWO_ENCODERS, BOTH, CP_2, sounds=FAN_OUT),
        row(4, TWO_ENCODERS_IN_BUBBLES, BOTH, PP_2, sounds=FAN_IN),
    ],
    "packed samples of odd lengths": [row(4, PACKED, FAN_OUT, VPP_2)],
    "fewer microbatches than stages": [row(4, replace(UNEVEN, microbatches=1), FAN_IN, CP_2_PP_2)],
    "a loss that is a mean of means": [row(4, MEAN_OF_MEANS, FAN_IN, PP_2)],
    "encoder in the bubbles": [
        *(row(4, IN_BUBBLES, FAN_IN, language) for language in (CP_2_PP_2, VPP_2)),
        row(4, replace(IN_BUBBLES, microbatches=2), FAN_IN, PP_4),
        row(4, replace(IN_BUBBLES, macro_batch=2), FAN_IN, PP_2),
        row(4, TEXT_ONLY_PART_IN_BUBBLES, FAN_IN, PP_4),
    ],
    "a frozen module": [
        row(4, replace(UNEVEN, frozen=(IMAGES,)), FAN_OUT, CP_2),
        row(4, replace(IN_BUBBLES, microbatches=4, frozen=(LANGUAGE,)), FAN_IN, CP_2_PP_2),
        row(4, replace(IN_BUBBLES, microbatches=4, frozen=(IMAGES,)), FAN_IN, VPP_2),
    ],
}
"""Rows by what they show; most are with a pipeline, with virtual stages and without a pipeline."""


@pytest.mark.parametrize(
    ("job", "layouts", "planned"),
    [
        pytest.param(
            *row,
            id=f"{shows}-{number}".replace(" ", "-"),
            marks=[requires_world_size(ranks), pytest.mark.shows(shows)],
        )
        for shows, rows in ROWS.items()
        for number, (ranks, *row) in enumerate(rows)
    ],
)
def test_the_loss_falls_as_in_plain_pytorch(job, layouts, planned):
    check(job, planned=planned, **layouts)


@requires_world_size(4)
@pytest.mark.parametrize(("encoder", "language"), [(FAN_IN, CP_2_PP_2), (FAN_OUT, CP_2)], ids=str)
def test_the_host_waits_for_nothing_once_a_batch_brings_a_plan(encoder, language):
    """Encoders, bridge, schedule and MimoModel, backward and reduction of gradients included.

    The first step fills caches, of layouts and of attention.
    """
    language = language | {"variable_lengths": False}  # else stages tell each other shapes
    with modules(images=encoder, language=language) as made:
        train(TOLD, made, 3, around=lambda n: no_host_sync() if n else nullcontext())


@requires_world_size(4)
@pytest.mark.parametrize(("encoder", "language"), [(FAN_IN, CP_2_PP_2), (FAN_OUT, VPP_2)], ids=str)
def test_unequal_samples_without_a_plan_are_refused_on_every_rank(encoder, language):
    with modules(**{LANGUAGE: language, IMAGES: encoder}) as made:
        with pytest.raises(ValueError, match="equal parts of a batch must have .* batch_plan"):
            train(UNEVEN, made, 1, planned=False)


@requires_world_size(4)
@pytest.mark.parametrize("language", [CP_2_PP_2, CP_2], ids=str)
def test_every_stage_is_told_of_padding(language, monkeypatch):
    """Its experts leave padding out of their balance; test_mimo_partition.py checks the mask."""
    forward, told = GPTModel.forward, []

    def noted(model, *arguments, padding_mask=None, **others):
        told.append(padding_mask is not None)
        return forward(model, *arguments, padding_mask=padding_mask, **others)

    monkeypatch.setattr(GPTModel, "forward", noted)
    with modules(images=FAN_IN, language=language) as made:
        train(PACKED, made, 1)
    assert told and all(told)
