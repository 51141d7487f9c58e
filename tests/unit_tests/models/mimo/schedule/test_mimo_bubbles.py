# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Encoder work in the pipeline's bubbles: when ranks are late, what is kept, what is refused.

That it changes nothing of what is trained is in the rows of test_mimo_colocated_e2e.py.
"""

import contextlib
import itertools
import random
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core.cpu_runtime import collectives
from megatron.core.models.mimo.forward import macro_batches
from megatron.core.models.mimo.schedule import encoder_work
from megatron.core.models.mimo.schedule.bubble_plan import (
    BACKWARD,
    ENCODE,
    RETURN,
    Piece,
    bubble_plan,
)
from megatron.core.models.mimo.schedule.encoder_work import EncoderWork
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.pipeline_parallel import schedules
from tests.unit_tests.models.mimo.mimo_gpt import IMAGES, Module
from tests.unit_tests.models.mimo.mimo_gpt_training import Job, train
from tests.unit_tests.models.mimo.whole_steps.test_mimo_colocated_e2e import (
    CP_2_PP_2,
    FAN_IN,
    IN_BUBBLES,
    PP_2,
    PP_4,
    TEXT_ONLY_PART_IN_BUBBLES,
    VPP_2,
    check,
    modules,
    samples,
)
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

EQUAL_LENGTHS = {"variable_lengths": False}
EQUAL_PP_4 = PP_4 | EQUAL_LENGTHS


@requires_world_size(4)
def test_a_first_step_in_which_kernels_are_loaded(monkeypatch):
    monkeypatch.setattr(encoder_work, "_is_on_gpu", lambda _: True)
    around = mock.Mock(wraps=encoder_work.pieces_around_the_pipeline)
    monkeypatch.setattr(encoder_work, "pieces_around_the_pipeline", around)
    check(replace(TEXT_ONLY_PART_IN_BUBBLES, overlap=True), VPP_2, images=FAN_IN)
    assert around.call_count == 1


@requires_world_size(4)
def test_an_encoder_that_every_rank_runs_reduces_during_its_last_backward(monkeypatch):
    monkeypatch.setattr(VisionModalitySubmodules, "runs_on_every_rank", True, raising=False)
    even = samples(*({IMAGES: 3} for _ in range(16)), length=12)
    check(replace(IN_BUBBLES, samples=even, microbatches=4, overlap=True), PP_2, images=FAN_IN)


@requires_world_size(4)
@pytest.mark.parametrize("language", [PP_4, VPP_2], ids=str)
def test_ranks_that_are_late_at_random(language, monkeypatch):
    """Each piece and each operation of the pipeline is late by itself, on each rank alone."""
    rng = random.Random(Utils.rank)

    def late(function):
        def call(*args, **kwargs):
            time.sleep(rng.choice([0, 0, 0.002, 0.02]))
            return function(*args, **kwargs)

        return call

    pieces = [(EncoderWork, name) for name in ("_encode", "_return", "_backward")]
    for owner, name in ((schedules, "forward_step"), (schedules, "backward_step"), *pieces):
        monkeypatch.setattr(owner, name, late(getattr(owner, name)))
    check(replace(IN_BUBBLES, microbatches=4), language, images=FAN_IN)


@requires_world_size(4)
@pytest.mark.parametrize("language", [CP_2_PP_2, VPP_2, PP_4], ids=str)
def test_set_up_uses_all_links_and_groups_once(language, monkeypatch):
    """With NCCL, a first use makes hosts wait for each other; within a step, in a circle."""
    used, new = set(), set()
    training = False

    def noted(name, key):
        function = getattr(dist, name)

        def call(*args, **kwargs):
            of = name, *key(kwargs)
            new.add(of) if training and of not in used else used.add(of)
            return function(*args, **kwargs)

        monkeypatch.setattr(dist, name, call)

    noted("isend", lambda given: (given["dst"], given["group"]))
    noted("irecv", lambda given: (given["src"], given["group"]))
    noted("all_to_all_single", lambda given: (given["group"],))

    def around(_):
        nonlocal training
        training = True
        return contextlib.nullcontext()

    with modules(images=FAN_IN, language=language | EQUAL_LENGTHS) as made:
        train(IN_BUBBLES, made, 1, around=around)
    assert used and not new


class _Call:
    """A call of ``encode``, alive as long as what it saved for the backward."""


def most_kept_in_a_step(microbatches: int, monkeypatch) -> int:
    """Most microbatches whose activations this rank keeps, with an image for each of them."""
    alive, most, encode = weakref.WeakSet(), 0, macro_batches.encode

    def counted(*arguments):
        nonlocal most
        call = _Call()
        alive.add(call)
        most = max(most, len(alive))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (call, t), lambda kept: kept[1]):
            return encode(*arguments)

    patches = [{IMAGES: 3}] * (4 * microbatches)
    job = Job(samples(*patches, length=12), microbatches=microbatches, in_bubbles=True)
    with monkeypatch.context() as patch, modules(images=FAN_IN, language=EQUAL_PP_4) as made:
        patch.setattr(macro_batches, "encode", counted)
        train(job, made, 1)
    assert not alive
    return most


@requires_world_size(4)
def test_activations_do_not_grow_with_the_batch(monkeypatch):
    """A rank keeps what the plan says, 2p + 1 macro-batches at most."""
    kept = [_most_kept(bubble_plan(4, m, 1), Utils.rank) for m in (8, 16, 32)]
    assert [most_kept_in_a_step(m, monkeypatch) for m in (8, 16, 32)] == kept
    assert kept[1] == kept[2] <= 9


def _most_kept(plan, stage: int) -> int:
    """Largest number of macro-batches whose activations a stage of a plan keeps."""
    pieces = [piece for place in plan.before[stage] for piece in place]
    changes = [{ENCODE: 1, RETURN: 0, BACKWARD: -1}[piece.kind] for piece in pieces]
    return max(itertools.accumulate(changes))


def _too_early(*arguments):
    """A plan whose second stage waits for gradients before the operation that they come from."""
    plan = bubble_plan(*arguments)
    moved = [Piece(RETURN, 0), Piece(BACKWARD, 0)]
    stage = [[piece for piece in place if piece not in moved] for place in plan.before[1]]
    stage[1] += moved
    return plan._replace(before=(plan.before[0], stage, *plan.before[2:]))


@requires_world_size(4)
@pytest.mark.skipif(HAVE_CUDA, reason="NCCL ends the process")
def test_two_pieces_swapped_end_in_a_message(monkeypatch):
    limit = timedelta(seconds=4)
    monkeypatch.setattr(collectives, "_time_limit_of_world", lambda: limit)
    monkeypatch.setattr(encoder_work, "bubble_plan", _too_early)
    with modules(images=FAN_IN, language=EQUAL_PP_4) as made:
        with pytest.raises(RuntimeError, match="(?i)timed out|connection"):
            train(IN_BUBBLES, made, 1)


@requires_world_size(4)
@pytest.mark.parametrize(
    ("encoder", "language", "planned", "text"),
    [
        (FAN_IN, dict(dp=4), True, "needs a pipeline"),
        (dict(tp=4), PP_2 | EQUAL_LENGTHS, True, "TP group of images in one"),
        (FAN_IN, PP_2, True, "variable_seq_lengths"),
        (FAN_IN, VPP_2 | EQUAL_LENGTHS, True, "needs overlap_p2p_comm with virtual stages"),
        (FAN_IN, PP_2 | EQUAL_LENGTHS, False, "batch_plan"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(encoder, language, planned, text, monkeypatch):
    config = Module.config
    monkeypatch.setattr(
        Module, "config", lambda module: replace(config(module), overlap_p2p_comm=False)
    )
    with modules(images=encoder, language=language) as made:
        with pytest.raises(ValueError, match=text):
            train(IN_BUBBLES, made, 1, planned=planned)
