# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Batches as callers of upstream's PR give them: unpadded, without a plan, or with a mean as loss.

Steps of ``colocated_forward_backward_with_pp`` itself are in test_mimo_three_phases.py.
"""

from dataclasses import replace

import pytest

from examples.mimo.common.layout import parse_layout
from examples.mimo.nemotron_vlm.data.reading import Reader
from examples.mimo.nemotron_vlm.loop import builder
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.colocated_schedule import colocated_forward_backward_with_pp
from megatron.core.models.mimo.setup.data_parallel import prepare_for_training
from tests.unit_tests.examples.nemotron_vlm.loop.rows import CONTIGUOUS
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import one_rank_trajectory
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import requires_world_size

SAMPLES, MICROBATCHES = 16, 2
COMMON = ("--data", "digits:2", "--global-batch-size", str(SAMPLES))
GATED = ("--model", "tiny-gdn")


def prepare_for_means(stages, *arguments) -> None:
    for module in stages[0].modules():
        if hasattr(module, "config"):
            module.config.calculate_per_token_loss = False
    prepare_for_training(stages, *arguments)


@requires_world_size(4)
@pytest.mark.parametrize(
    ("encoder", "language", "length", "model", "per_token"),
    [
        pytest.param("tp=4,dp=1", "cp=2,pp=2,dp=1", 15, (), True, id="padded-cp-pp"),
        pytest.param("tp=4,dp=1", "tp=2,cp=2,dp=1", 15, (), True, id="padded-tp-cp"),
        pytest.param("tp=2,dp=2", "cp=2,dp=2", 15, GATED, True, id="padded-contiguous-cp"),
        pytest.param("tp=1,dp=4", "tp=2,dp=2", 16, (), False, id="mean-of-the-ranks-means"),
    ],
)
def test_a_step_is_that_of_one_rank(encoder, language, length, model, per_token, monkeypatch):
    """All samples have as many tokens, so that the mean of the ranks' means is that of all. Tokens
    that CP adds to 15 count in no balancing loss, as on one rank, which adds none."""
    common = (*COMMON, *model, "--moe-aux-loss-coeff", "1" if per_token else "0")
    whole = (*common, "--seq-length", str(length))
    expected = one_rank_trajectory(*whole, "--micro-batch-size", "8", steps=1)
    if not per_token:
        monkeypatch.setattr(builder, "prepare_for_training", prepare_for_means)
    dp = parse_layout(language, "language").dp
    layouts = "--encoder", encoder, "--language", language, "--seq-length", "16"
    layouts += ("--micro-batch-size", str(SAMPLES // MICROBATCHES // dp))
    read = Reader._read

    def read_without_plan(reader: Reader, take) -> dict[str, object]:
        batch = read(reader, take)
        del batch["batch_plan"]
        return batch

    monkeypatch.setattr(Reader, "_read", read_without_plan)
    with trainer(*common, *layouts, *(CONTIGUOUS if model else ())) as run:
        run.loading.reader = replace(run.loading.reader, seq_length=length)
        found = run.train_step()
    # Megatron divides the total in place, also the reported one, where the loss is a mean.
    for name in ("loss", "grad_norm") if per_token else ("grad_norm",):
        assert found[name] == pytest.approx(expected[0][name], rel=1e-5)


def test_batches_that_would_have_to_be_shared_out_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    grids = (HyperCommGrid([1, 4], ["tp", "dp"]), HyperCommGrid([2, 2], ["tp", "dp"]))
    with pytest.raises(ValueError, match="other samples of images than they consume"):
        colocated_forward_backward_with_pp(None, iter(()), 1, *grids)
    fewer = HyperCommGrid([1, 2], ["tp", "dp"], rank_offset=2)
    with pytest.raises(ValueError, match=r"other ranks: \[\(0, 4\), \(2, 2\)\]"):
        colocated_forward_backward_with_pp(None, iter(()), 1, grids[0], fewer)
