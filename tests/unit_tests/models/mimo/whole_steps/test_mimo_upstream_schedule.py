# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""``colocated_forward_backward_with_pp`` with the arguments of upstream's PR trains as one rank."""

import pytest
import torch

from examples.mimo.nemotron_vlm.loop import builder
from examples.mimo.nemotron_vlm.loop.forward_step import LOSS
from examples.mimo.nemotron_vlm.model.names import IMAGES
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.bridge.topology import bridge_topology
from megatron.core.models.mimo.colocated_schedule import colocated_forward_backward_with_pp
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.setup.data_parallel import prepare_for_training
from tests.unit_tests.examples.nemotron_vlm import runs
from tests.unit_tests.examples.nemotron_vlm.loop.rows import CONTIGUOUS
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import one_rank_trajectory
from tests.unit_tests.test_utilities import Utils, requires_world_size

SAMPLES, MICROBATCHES = 16, 2
ANSWER = 3
"""Tokens with a loss in each sample: two digits and the end."""

COMMON = ("--data", "digits:2", "--global-batch-size", str(SAMPLES))
GATED = ("--model", "tiny-gdn")


def batch_of(source, numbers: range, length: int) -> dict[str, object]:
    texts = [source.text("train", number) for number in numbers]
    ids, labels, mask = (
        torch.stack([torch.nn.functional.pad(part, (0, length - len(part))) for part in parts]).to(
            Utils.device
        )
        for parts in zip(*texts, strict=True)
    )
    tiles = torch.cat([source.tiles("train", number) for number in numbers]).to(Utils.device)
    return {
        "input_ids": ids,
        "labels": labels,
        "loss_mask": mask,
        "position_ids": torch.arange(length, device=Utils.device).expand_as(ids),
        "modality_inputs": {IMAGES: {"radio": {"tiles": tiles}}},
    }


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
        pytest.param("tp=2,dp=2", "tp=2,dp=2", 16, (), False, id="mean-of-the-ranks-means"),
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
    dp = int(language.split(",dp=")[1][0])
    size = SAMPLES // MICROBATCHES // dp
    layouts = "--encoder", encoder, "--language", language, "--micro-batch-size", str(size)
    layouts += ("--seq-length", "16", *(CONTIGUOUS if model else ()))
    with runs.trainer(*common, *layouts) as run:
        grids = {name: module.grid for name, module in run.session.modules.items()}
        topology = bridge_topology(grids[IMAGES], grids[LANGUAGE])
        atoms = topology.encodes(Utils.rank)
        each = SAMPLES // topology.atoms * len(atoms) // MICROBATCHES
        first = SAMPLES // topology.atoms * atoms.start
        batches = [
            batch_of(run.source, range(first + n * each, first + (n + 1) * each), length)
            for n in range(MICROBATCHES)
        ]

        def schedule(*, model, num_microbatches, pg_collection, seq_length, micro_batch_size, **_):
            groups = pg_collection.get_language_model_collection()
            reports = colocated_forward_backward_with_pp(
                model[0],
                iter(batches),
                num_microbatches,
                encoder_grid=grids[IMAGES],
                llm_grid=grids[LANGUAGE],
                encoder_name=IMAGES,
                pg_collection=groups,
                p2p_communicator=None,
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
            )
            tokens = SAMPLES * ANSWER / MICROBATCHES / groups.dp_cp.size()
            return [
                {LOSS: torch.stack([report["loss_reduced"], torch.full_like(total, tokens)])}
                for report in reports
                for total in report.values()
            ]

        monkeypatch.setattr(runs, "get_forward_backward_func", lambda **_: schedule)
        found = run.train_step()
    # Megatron divides the total in place, also the reported one, where the loss is a mean.
    for name in ("loss", "grad_norm") if per_token else ("grad_norm",):
        assert found[name] == pytest.approx(expected[0][name], rel=1e-5)


@requires_world_size(4)
def test_batches_that_would_have_to_be_shared_out_are_refused():
    Utils.initialize_distributed()
    grids = (HyperCommGrid([1, 4], ["tp", "dp"]), HyperCommGrid([2, 2], ["tp", "dp"]))
    with pytest.raises(ValueError, match="other samples of images than they consume"):
        colocated_forward_backward_with_pp(None, iter(()), 1, *grids)
    fewer = HyperCommGrid([1, 2], ["tp", "dp"], rank_offset=2)
    with pytest.raises(ValueError, match=r"other ranks: \[\(0, 4\), \(2, 2\)\]"):
        colocated_forward_backward_with_pp(None, iter(()), 1, grids[0], fewer)
