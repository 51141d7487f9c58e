# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Packed rows train as samples one by one; what does not go with packing is refused."""

import pytest

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data.rows import Packing, Rows
from examples.mimo.nemotron_vlm.options.arguments import parse
from tests.unit_tests.examples.nemotron_vlm.runs import LOCAL, trainer
from tests.unit_tests.models.mimo.one_step import PROPORTIONAL_STEP, TOLERANCE
from tests.unit_tests.models.mimo.weights import assert_shards_moved_alike, gather_weights
from tests.unit_tests.test_utilities import requires_world_size

PACKED = "--transformer-impl local --pack --micro-batch-size 1 --seq-length 64 --pack-window 24 "
PACKED += "--sample-multiple 16"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--micro-batch-size 2", "--micro-batch-size must be 1"),
        ("--eval-iters 1 --eval-micro-batch-size 2", "--eval-micro-batch-size must be 1"),
        ("--sample-multiple 24", "--sample-multiple 24 must divide --seq-length 64"),
        ("--sample-multiple 2 --language tp=2,cp=2", "needs a multiple of 8"),
    ],
)
def test_what_does_not_go_with_packing_is_refused(arguments, text):
    with pytest.raises(UserError, match=text):
        parse(f"{PACKED} {arguments} --encoder dp=4".split(), world_size=4)


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
        rows = round(24 / stream.samples_a_row())
        assert rows < 24
        with trainer(*PACKED.split(), *losses, "--global-batch-size", str(rows)) as run:
            together = run.train_step()
            assert_shards_moved_alike(run.stages, before, after, TOLERANCE)
        assert together["loss"] == pytest.approx(one_by_one["loss"], rel=1e-6)
        assert together["num_tokens"] == one_by_one["num_tokens"]
