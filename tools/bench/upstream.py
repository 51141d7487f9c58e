# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run a script of upstream's, of the tree in the working directory, and record its steps.

    torchrun … upstream.py SCRIPT [its options] --metrics-out FILE

The file gets a line a step as the training program writes them: the seconds of the slowest rank,
until the device has ended it, a loss of those that ranks compute, and the largest peak of memory so
far in GiB. Two things are turned off: the compiled index builder, which mock data do not need, and
the log of steps, which fails with experts, as it asks for global groups for their losses.
"""

import functools
import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, os.getcwd())

from megatron.core.datasets import utils  # noqa: E402
from megatron.training import training  # noqa: E402


def recorded(train_step, file: Path):
    """Return ``train_step`` with a line in the file for each step."""

    @functools.wraps(train_step)
    def step(*args, **kwargs):
        started = time.perf_counter()
        found = train_step(*args, **kwargs)
        torch.cuda.synchronize()
        seconds, peak = time.perf_counter() - started, torch.cuda.max_memory_allocated() / 2**30
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (seconds, peak, [float(loss) for loss in found[0].values()]))
        if dist.get_rank() == 0:
            seconds, peaks, losses = zip(*ranks, strict=True)
            record = {"step_time_s": max(seconds), "memory_gib": max(peaks), "skipped": found[1]}
            record["loss"] = next(each[0] for each in losses if each)
            with file.open("a") as lines:
                lines.write(json.dumps(record) + "\n")
        return found

    return step


if __name__ == "__main__":
    utils.compile_helpers = lambda: None
    training.train_step = recorded(training.train_step, Path(sys.argv.pop()))
    training.training_log = lambda *_, **__: False
    del sys.argv[0], sys.argv[-1]
    runpy.run_path(sys.argv[0], run_name="__main__")
