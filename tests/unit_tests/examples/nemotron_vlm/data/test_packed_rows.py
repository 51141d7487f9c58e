# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Packed rows train as samples one by one."""

import pytest

from examples.mimo.nemotron_vlm.data.rows import Packing, Rows
from tests.unit_tests.examples.nemotron_vlm.loop.models import PACK
from tests.unit_tests.examples.nemotron_vlm.runs import LOCAL, trainer
from tests.unit_tests.models.mimo.one_step import PROPORTIONAL_STEP, TOLERANCE
from tests.unit_tests.models.mimo.weights import assert_shards_moved_alike, gather_weights
from tests.unit_tests.test_utilities import requires_world_size


class TestPackedRows:
    @requires_world_size(1)
    def test_packed_samples_train_as_samples_one_by_one(self):
        """The first window is packed into rows, and also laid out with a row for each sample.

        Experts are not balanced: balancing counts padding, of which the two have unlike amounts.
        """
        alone = ("--global-batch-size", "24", "--micro-batch-size", "1", "--seq-length", "64")
        losses = (
            *(*LOCAL, *PROPORTIONAL_STEP, "--moe-aux-loss-coeff", "0"),
            "--no-moe-router-enable-expert-bias",
        )
        with trainer(*alone, *losses) as run:
            before = gather_weights(run.stages)
            one_by_one = run.train_step()
            after = gather_weights(run.stages)
            stream = Rows(run.source, "train", 64, Packing(window=24, multiple=16), run.args.seed)
        rows = len(stream.first())
        assert rows < 24
        with trainer(*PACK, *alone[2:4], *losses, "--global-batch-size", str(rows)) as run:
            together = run.train_step()
            assert_shards_moved_alike(run.stages, before, after, TOLERANCE)
        assert together["loss"] == pytest.approx(one_by_one["loss"], rel=1e-6)
        assert together["num_tokens"] == one_by_one["num_tokens"]
