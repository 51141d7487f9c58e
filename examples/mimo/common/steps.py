# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Steps of Megatron's loop: the rows of each, and the microbatches that the loop draws."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from examples.mimo.common.errors import UserError
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

Microbatch = dict[str, object]
"""The keyword arguments of a MimoModel's forward."""

Step = tuple[int, int, int]
"""A step: number of its first row, number of its microbatches, and rows of a DP rank in each."""


def data_provider(loading: Any, begin: Callable[[], None] = lambda: None) -> Callable:
    """Return the data provider for ``pretrain``: it gives iterators for training and evaluation.

    Args:
        loading: this rank's data loading, whose ``training`` and ``held_out`` return iterators over
            microbatches without end.
        begin: called first. Megatron asks for the data once a checkpoint is loaded.
    """

    def provider(_sizes, vp_stage: int | None = None):
        begin()
        return loading.training(), loading.held_out(), None

    provider.is_distributed = True
    return provider


def training_steps(args: Namespace, dp: int) -> Iterator[Step]:
    """Yield steps without end, from the first row that the run has not consumed."""
    growing = args.step_batch_size_schedule and growing_batch(args)
    size, micro_size = args.global_batch_size, args.micro_batch_size
    first = args.consumed_train_samples
    while True:
        if growing:
            growing.update(first, consistency_check=False)
            size = growing.get_current_global_batch_size()
        yield first, size // (micro_size * dp), micro_size
        first += size


def held_out_steps(args: Namespace, dp: int) -> Iterator[Step]:
    """Yield the steps of one evaluation after another; every evaluation reads the same rows."""
    size, micro_size = args.eval_global_batch_size, args.eval_micro_batch_size
    while True:
        for number in range(args.eval_iters):
            yield number * size, size // (micro_size * dp), micro_size


def growing_batch(args: Namespace) -> StepBatchsizeNumMicroBatchesCalculator:
    """Return Megatron's batch size calculator for ``--step-batch-size-schedule``.

    Raises:
        UserError: the option's value is no schedule.
    """
    text = args.step_batch_size_schedule
    try:
        return StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, text, args.seq_length)
    except (ValueError, AssertionError, ArithmeticError) as error:
        raise UserError(
            f"--step-batch-size-schedule {text}: {error}; give TOKENS:SIZE TOKENS:SIZE …"
        ) from error


def batches_of_first_size(args: Namespace) -> int:
    """Return how many batches of a growing batch's first size hold the samples of all iterations.

    Megatron converts the learning rate schedule from iterations to samples by the first size.
    """
    batch, consumed = growing_batch(args), 0
    first = batch.get_current_global_batch_size()
    for _ in range(args.train_iters):
        batch.update(consumed, consistency_check=False)
        consumed += batch.get_current_global_batch_size()
    return -(-consumed // first)
