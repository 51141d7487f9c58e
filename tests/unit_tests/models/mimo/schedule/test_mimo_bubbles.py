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

LAYOUTS = [PP_4, PP_2, CP_2_PP_2, VPP_2]


@requires_world_size(4)
class TestFourRanks:
    @pytest.mark.parametrize("language", [PP_4, VPP_2], ids=str)
    def test_a_first_step_in_which_kernels_are_loaded(self, language, monkeypatch):
        monkeypatch.setattr(encoder_work, "_is_on_gpu", lambda _: True)
        around = mock.Mock(wraps=encoder_work.pieces_around_the_pipeline)
        monkeypatch.setattr(encoder_work, "pieces_around_the_pipeline", around)
        check(replace(TEXT_ONLY_PART_IN_BUBBLES, overlap=True), language, images=FAN_IN)
        assert around.call_count == 1

    def test_an_encoder_that_every_rank_runs_reduces_during_its_last_backward(self, monkeypatch):
        monkeypatch.setattr(VisionModalitySubmodules, "runs_on_every_rank", True, raising=False)
        even = samples(*({IMAGES: 3} for _ in range(16)), length=12)
        job = replace(IN_BUBBLES, samples=even, microbatches=4, overlap=True)
        check(job, PP_2, images=FAN_IN)

    @pytest.mark.parametrize("language", [PP_4, VPP_2], ids=str)
    def test_ranks_that_are_late_at_random(self, language):
        """Each piece and each operation of the pipeline is late by itself, on each rank alone."""
        rng = random.Random(Utils.rank)

        def late(function):
            def call(*args, **kwargs):
                time.sleep(rng.choice([0, 0, 0.002, 0.02]))
                return function(*args, **kwargs)

            return call

        with contextlib.ExitStack() as stack:
            for owner, name in (
                (schedules, "forward_step"),
                (schedules, "backward_step"),
                (EncoderWork, "_encode"),
                (EncoderWork, "_return"),
                (EncoderWork, "_backward"),
            ):
                slow = late(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, slow))
            check(replace(IN_BUBBLES, microbatches=4), language, images=FAN_IN)


@requires_world_size(4)
@pytest.mark.parametrize("language", LAYOUTS, ids=str)
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

    with modules(images=dict(dp=4), language=language | {"variable_lengths": False}) as made:
        train(IN_BUBBLES, made, 1, around=around)
    assert used and not new


class _Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Saved:
    """Bytes that the encoders keep for their backward, beside weights: now and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def counted(self, encode):
        """Wrap ``encode`` to count the bytes that it saves for as long as they are kept."""

        def call(model, *args):
            weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

            def pack(tensor):
                kept = _Kept(tensor)
                if tensor.untyped_storage().data_ptr() not in weights:
                    self._add(tensor.nbytes)
                    weakref.finalize(kept, self._add, -tensor.nbytes)
                return kept

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
                return encode(model, *args)

        return call

    def _add(self, count: int) -> None:
        self.now += count
        self.most = max(self.most, self.now)


def most_saved(microbatches: int, in_bubbles: bool) -> int:
    """Most bytes saved on this rank in a step with an equal image for each rank and microbatch."""
    saved, patches = Saved(), [{IMAGES: 3}] * (4 * microbatches)
    job = Job(samples(*patches, length=12), microbatches=microbatches, in_bubbles=in_bubbles)
    with contextlib.ExitStack() as stack:
        counted = saved.counted(macro_batches.encode)
        stack.enter_context(mock.patch.object(macro_batches, "encode", counted))
        language = PP_4 | {"variable_lengths": False}
        made = stack.enter_context(modules(images=dict(dp=4), language=language))
        train(job, made, 1)
    assert saved.now == 0
    return saved.most


@requires_world_size(4)
def test_activations_do_not_grow_with_the_batch():
    """A rank keeps what the plan says, 2p + 1 macro-batches at most; three phases keep all."""
    one = most_saved(1, in_bubbles=False)
    assert [most_saved(m, in_bubbles=False) for m in (8, 32)] == [8 * one, 32 * one]
    kept = [_most_kept(bubble_plan(4, m, 1), Utils.rank) for m in (8, 16, 32)]
    assert [most_saved(m, in_bubbles=True) for m in (8, 16, 32)] == [n * one for n in kept]
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
    language = PP_4 | {"variable_lengths": False}
    with modules(images=dict(dp=4), language=language) as made:
        with pytest.raises(RuntimeError, match="(?i)timed out|connection"):
            train(IN_BUBBLES, made, 1)


@requires_world_size(4)
class TestRefusals:
    @pytest.mark.parametrize(
        ("encoder", "language", "text"),
        [
            (dict(dp=4), dict(pp=1, dp=4), "needs a pipeline"),
            (dict(tp=4), PP_2 | {"variable_lengths": False}, "TP group of images in one"),
            (dict(dp=4), PP_2, "variable_seq_lengths"),
        ],
    )
    def test_says_what_cannot_be_on_every_rank(self, encoder, language, text):
        with modules(images=encoder, language=language) as made:
            with pytest.raises(ValueError, match=text):
                train(IN_BUBBLES, made, 1)

    def test_virtual_stages_whose_transfers_do_not_overlap(self, monkeypatch):
        config = Module.config

        def without_overlap(module):
            made = config(module)
            made.overlap_p2p_comm = False
            return made

        monkeypatch.setattr(Module, "config", without_overlap)
        with modules(images=FAN_IN, language=VPP_2 | {"variable_lengths": False}) as made:
            with pytest.raises(ValueError, match="needs overlap_p2p_comm with virtual stages"):
                train(IN_BUBBLES, made, 1)

    def test_microbatches_without_a_plan(self):
        language = PP_2 | {"variable_lengths": False}
        with modules(images=dict(dp=4), language=language) as made:
            with pytest.raises(ValueError, match="batch_plan"):
                train(IN_BUBBLES, made, 1, planned=False)
