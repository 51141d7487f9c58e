# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Encoder work in the pipeline's bubbles: when ranks are late, what is kept, what is refused.

Rows of rows.py with `BUBBLES` compare what is trained with one rank.
"""

import random
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from examples.mimo.nemotron_vlm.encoders.stage import EncoderStage
from megatron.core.models.mimo.forward import macro_batches
from megatron.core.models.mimo.schedule import encoder_work
from megatron.core.models.mimo.schedule.bubble_plan import bubble_plan
from megatron.core.models.mimo.schedule.encoder_work import EncoderWork, prepare_bubbles
from megatron.core.pipeline_parallel import schedules
from megatron.core.rerun_state_machine import RerunDataIterator
from tests.unit_tests.examples.nemotron_vlm.loop.rows import BUBBLES, FLAT, OVERLAP, PIPELINE, Row
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import check
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.models.mimo.schedule.test_mimo_bubble_plan import kept_by_stage
from tests.unit_tests.test_utilities import Utils, requires_world_size

PP_4, PP_2, VPP_2 = "pp=4,dp=1", "pp=2,dp=2,ep=2", "pp=2,vpp=2,dp=2,ep=2"
TWO_ENCODERS = 4, "sound and images", "images:tp=2,dp=2 sound:dp=4"

pytestmark = requires_world_size(4)


def run_of(language: str, *options: str, encoder: str = "dp=4", microbatches: int = 8):
    """A run of four samples a microbatch."""
    layout = ("--encoder", encoder, "--language", language)
    size = 4 // int(language.split("dp=")[1][0])
    batch = ("--global-batch-size", str(4 * microbatches), "--micro-batch-size", str(size))
    return trainer(*layout, *batch, *options)


def test_a_first_step_in_which_kernels_are_loaded(monkeypatch, record_property):
    monkeypatch.setattr(encoder_work, "_is_on_gpu", lambda _: True)
    around = mock.Mock(wraps=encoder_work.pieces_around_the_pipeline)
    monkeypatch.setattr(encoder_work, "pieces_around_the_pipeline", around)
    check(Row(*TWO_ENCODERS, PIPELINE, (*BUBBLES, *OVERLAP)), record_property)
    assert around.call_count == 1


@pytest.mark.parametrize("language", [PIPELINE, FLAT])
def test_encoders_that_some_ranks_do_not_run_reduce_after_the_backward(
    language, monkeypatch, record_property
):
    monkeypatch.setattr(EncoderStage, "runs_on_every_rank", False)
    options = (*BUBBLES, *OVERLAP) if language is PIPELINE else OVERLAP
    check(Row(*TWO_ENCODERS, language, options), record_property)


@pytest.mark.parametrize("language", [PP_4, VPP_2])
def test_ranks_that_are_late_at_random(language, monkeypatch, record_property):
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
    check(Row(4, "tiny", "dp=4", language, BUBBLES), record_property)


@pytest.mark.parametrize("language", [PIPELINE, VPP_2, PP_4])
def test_set_up_uses_all_links_and_groups_once(language, monkeypatch):
    """With NCCL, a first use makes hosts wait for each other; within a step, in a circle."""
    used = []

    def noted(name, key):
        function = getattr(dist, name)

        def call(*args, **kwargs):
            used.append((name, *key(kwargs)))
            return function(*args, **kwargs)

        monkeypatch.setattr(dist, name, call)

    noted("isend", lambda given: (given["group"], given["dst"]))
    noted("irecv", lambda given: (given["group"], given["src"]))
    noted("all_to_all_single", lambda given: (given["group"],))
    with run_of(language, *BUBBLES) as run:
        before = set(used)
        run.train_step()
        (bridge,) = run.stages[0].colocated_comms.values()
        groups = (bridge.block_pg, bridge.return_pg, run.collection["language"].pp)
        assert before and not {use for use in used if use[1] in groups} - before


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

    with monkeypatch.context() as patch, run_of(PP_4, *BUBBLES, microbatches=microbatches) as run:
        patch.setattr(macro_batches, "encode", counted)
        run.train_step()
        assert not alive
    return most


def test_activations_do_not_grow_with_the_batch(monkeypatch):
    """A rank keeps what the plan says, 2p + 1 macro-batches at most."""
    kept = [kept_by_stage(bubble_plan(4, m, 1))[Utils.rank] for m in (8, 16, 32)]
    assert [most_kept_in_a_step(m, monkeypatch) for m in (8, 16, 32)] == kept
    assert kept[1] == kept[2] <= 9


@pytest.mark.parametrize(
    ("encoder", "language", "setting", "text"),
    [
        ("dp=4", "dp=4", {}, "needs a pipeline"),
        ("tp=4", PP_2, {}, "TP group of images in one"),
        ("dp=4", PP_2, {"variable_seq_lengths": True}, "with variable_seq_lengths"),
        ("dp=4", VPP_2, {"overlap_p2p_comm": False}, "needs overlap_p2p_comm with virtual stages"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(encoder, language, setting, text):
    with run_of(language, encoder=encoder) as run:
        vars(run.config).update(setting)
        with pytest.raises(ValueError, match=text):
            prepare_bubbles(run.stages)


def without_plan(batch: dict) -> dict:
    return {name: value for name, value in batch.items() if name != "batch_plan"}


@pytest.mark.parametrize(
    ("options", "text"),
    [(BUBBLES, "needs microbatches with a batch_plan"), ((), "equal parts of a batch must have")],
)
def test_unequal_samples_without_a_plan_are_refused_on_every_rank(options, text):
    with run_of(PIPELINE, *options, microbatches=1) as run:
        run._batches = RerunDataIterator(map(without_plan, run.loading.training()))
        with pytest.raises(ValueError, match=text):
            run.train_step()
