# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The iterators over microbatches that Megatron's loop draws from."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator

import torch

from examples.mimo.nemotron_vlm.batches import BatchPlan, Microbatch
from examples.mimo.nemotron_vlm.data import SampleSource
from examples.mimo.nemotron_vlm.layout import Layouts
from examples.mimo.nemotron_vlm.model import IMAGES
from examples.mimo.nemotron_vlm.presets import VLMPreset
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.module_groups import Modules, encoder_part
from megatron.core.num_microbatches_calculator import get_num_microbatches

Provider = Callable[..., tuple[Iterator[Microbatch], Iterator[Microbatch], None]]


def batch_plan(layouts: Layouts, preset: VLMPreset, modules: Modules) -> BatchPlan:
    """Which samples this rank takes."""
    language = modules[LANGUAGE].groups
    return BatchPlan(
        layouts,
        encoder_part=encoder_part(modules, IMAGES),
        language_dp=language and language.dp.rank(),
        tokens_per_tile=preset.encoder.tokens_per_tile,
    )


def data_provider(args: Namespace, plan: BatchPlan, source: SampleSource) -> Provider:
    """What ``pretrain`` takes as its provider of data sets: iterators for training and evaluation.

    Args:
        args: Megatron's.
        plan: of this rank.
        source: of samples.
    """

    def provider(_sizes, vp_stage: int | None = None):
        return training(args, plan, source), held_out(args, plan, source), None

    provider.is_distributed = True
    return provider


def training(args: Namespace, plan: BatchPlan, source: SampleSource) -> Iterator[Microbatch]:
    """Microbatches from the first sample on that the run has not consumed, without end.

    How many a step has is read when it begins: the batch may grow.
    """
    first = args.consumed_train_samples
    while True:
        count, micro_size = get_num_microbatches(), args.micro_batch_size
        yield from plan.microbatches(source, "train", first, count, micro_size, _device())
        first += count * micro_size * plan.layouts.language.dp


def held_out(args: Namespace, plan: BatchPlan, source: SampleSource) -> Iterator[Microbatch]:
    """Microbatches of the test split; every evaluation reads the same samples."""
    micro_size, size = args.eval_micro_batch_size, args.eval_global_batch_size
    count = size // (micro_size * plan.layouts.language.dp)
    while True:
        for number in range(args.eval_iters):
            first = number * size
            yield from plan.microbatches(source, "test", first, count, micro_size, _device())


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
