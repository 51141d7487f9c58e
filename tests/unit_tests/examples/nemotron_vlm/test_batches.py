# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which samples a rank takes, and that samples which don't add up are refused."""

import dataclasses

import pytest

from examples.mimo.nemotron_vlm.batches import BatchPlan
from examples.mimo.nemotron_vlm.data import make_source
from examples.mimo.nemotron_vlm.data.sample import IMAGE, READ
from examples.mimo.nemotron_vlm.errors import UserError
from examples.mimo.nemotron_vlm.layout import Batch, parse_layout
from examples.mimo.nemotron_vlm.layout_rules import resolve
from examples.mimo.nemotron_vlm.presets import tiny

MICROBATCHES = 2


def plan_of(rank: int, encoder: str, language: str) -> BatchPlan:
    """The plan of DP rank ``rank`` of both modules."""
    parsed = parse_layout(encoder, "encoder"), parse_layout(language, "language")
    layouts = resolve(*parsed, Batch(global_size=32, micro_size=4, seq_length=32), 4, tiny())
    return BatchPlan(layouts, rank, rank, tiny().encoder.tokens_per_tile)


class OneImageTokenTooFew:
    def __init__(self):
        self._source = make_source("digits", tiny().encoder, 32, seed=0)

    def sample(self, split, number):
        sample = self._source.sample(split, number)
        ids = sample.input_ids.clone()
        ids[(ids == IMAGE).nonzero()[0]] = READ
        return dataclasses.replace(sample, input_ids=ids)


class TestBatchPlan:
    def test_image_tokens_must_match_the_tiles(self):
        plan = plan_of(0, "dp=4", "dp=4")
        with pytest.raises(UserError, match="sample .* of train has .* image tokens for"):
            list(plan.microbatches(OneImageTokenTooFew(), "train", 7, MICROBATCHES, 4, "cpu"))

    @pytest.mark.parametrize("language", ["dp=4", "tp=2,dp=2", "pp=2,dp=2"])
    def test_every_sample_is_encoded_and_read_once(self, language):
        dp = parse_layout(language, "language").dp
        count = 32 // (4 * dp)
        for module, size in ((0, 4), (1, dp)):
            plans = [plan_of(rank, "dp=4", language) for rank in range(size)]
            taken = [
                sample
                for plan in plans
                for number in range(count)
                for sample in plan.indices(number, count, 4)[module]
            ]
            assert sorted(taken) == list(range(32))

    def test_with_a_pipeline_a_rank_encodes_and_reads_consecutive_samples(self):
        plan = plan_of(1, "dp=4", "pp=2,dp=2")
        taken = [plan.indices(number, 4, 4) for number in range(4)]
        encoded, read = zip(*taken, strict=True)
        assert [i for part in encoded for i in part] == list(range(8, 16))
        assert [i for part in read for i in part] == list(range(16, 32))
