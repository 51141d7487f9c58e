# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Logits and gradients of the program, with a checkpoint that it has loaded."""

import contextlib
from pathlib import Path

import torch

from examples.mimo.nemotron_vlm.data.sample import SampleSource
from examples.mimo.nemotron_vlm.loop.forward_step import forward_step
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.training import training as loop
from tests.unit_tests.examples.nemotron_vlm.loop.models import ENGINE
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import HAVE_CUDA

LENGTH, SAMPLES = 24, 4

BATCH = (
    *("--seq-length", str(LENGTH), "--global-batch-size", str(SAMPLES), "--micro-batch-size", "1"),
    *("--train-iters", "1", "--eval-iters", "1"),
)


def loading(directory: Path) -> tuple[str, ...]:
    """Options that load a converted checkpoint, on GPUs into the layers that are the default."""
    model = ("--model", str(directory / "model.json"), *(ENGINE if HAVE_CUDA else ()))
    return (*model, "--pretrained-checkpoint", str(directory))


def program_logits(*options: str, source: SampleSource) -> torch.Tensor:
    """The logits [samples, tokens, vocabulary] of all samples, on one rank."""
    rows: dict[int, torch.Tensor] = {}

    def step(microbatches, model):
        output, count = forward_step(microbatches, model)
        (number,) = count.args[4]
        rows[number] = output[0].float().cpu()
        return output, count

    with trainer(*BATCH, *options, source=source) as run:
        batches = RerunDataIterator(run.loading.held_out())
        loop.evaluate(
            step,
            batches,
            run.stages,
            None,
            run.config,
            pg_collection=run.collection,
            p2p_communicator=run.session.communicator,
        )
    return torch.stack([rows[number] for number in sorted(rows)])


def save_gradients(directory: Path, *options: str, source: SampleSource) -> None:
    """Save a checkpoint whose weights are the gradients of a step of all samples."""
    whole = ("--no-use-distributed-optimizer", "--no-save-optim", "--moe-aux-loss-coeff", "0")
    with trainer(*BATCH, *options, *whole, source=source) as run:
        weights = [weight for stage in run.stages for weight in stage.parameters()]
        kept: list[torch.Tensor] = []

        @contextlib.contextmanager
        def around():
            yield
            kept.extend(weight.main_grad.clone() for weight in weights)

        run.train_step(around)
        for weight, gradient in zip(weights, kept, strict=True):
            weight.data.copy_(gradient)
        run.save(directory)
