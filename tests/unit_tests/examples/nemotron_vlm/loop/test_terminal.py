# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A run says where it stands as it begins, and how it went as it ends."""

from argparse import Namespace

import pytest

from examples.mimo.nemotron_vlm.loop.terminal import beginning, ending

SAVED = {"encoder": "dp=2", "language": "tp=2", "lr": 1e-3, "train_iters": 100}
RUN = SAVED | {"load": "/saved", "finetune": False, "use_checkpoint_opt_param_scheduler": False}


@pytest.mark.parametrize(
    ("directory", "changed", "said"),
    [
        (None, {}, "a new run"),
        ("/weights/iter_0000100", {}, "a new run, with the weights of /weights/iter_0000100"),
        ("/saved/iter_0000100", {"finetune": True}, "a new run, with the weights of /saved/iter_"),
        ("/saved/iter_0000100", {}, "going on after step 100 of 100, from /saved/iter_0000100"),
        (
            "/saved/iter_0000100",
            {"encoder": "tp=2", "lr": 1e-4},
            "\nanother layout: encoder dp=2 → tp=2; random states begin anew"
            "\nanother schedule of learning rates: lr 0.001 → 0.0001",
        ),
    ],
)
def test_a_beginning_tells_where_the_run_stands(directory, changed, said):
    found = beginning(Namespace(**RUN | changed), directory, Namespace(**SAVED))
    assert said in found
    assert ("another" in found) == ("another" in said)


def test_an_ending_has_the_median_speed_without_the_first_step(tmp_path):
    args = Namespace(device="cpu", save="/saved", load="/saved", metrics_out=None)
    args.tensorboard_dir = None
    speeds = (1, 3000, 1000, 2000)
    records = [{"tokens_per_s": speed, "tflops": speed / 1000} for speed in speeds]
    assert ending(args, records, tmp_path / "log.txt").splitlines() == [
        "speed: 2,000 tokens/s and 2 TFLOP/s a rank",
        "checkpoints: /saved",
        f"log: {tmp_path}/log.txt",
        "next: the same command with a larger --train-iters goes on from here",
    ]
