# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run a script of upstream's, of the tree in the working directory, and record its steps.

    torchrun … upstream.py OUT SCRIPT [its options]

Each rank writes a line a step to ``OUT/RANK.jsonl``: its seconds, until the device has ended it;
its losses, on ranks that compute them; and the peak of memory so far in GiB. Two things are turned
off: the compiled index builder, which mock data do not need, and the log of steps, which fails with
experts, as it asks for global groups for their losses.
"""

import functools
import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch

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
        record = {"step_time_s": time.perf_counter() - started}
        record["losses"] = {name: float(loss) for name, loss in found[0].items()}
        record["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        with file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")
        return found

    return step


if __name__ == "__main__":
    rank_file = Path(sys.argv[1]) / f"{os.environ['RANK']}.jsonl"
    utils.compile_helpers = lambda: None
    training.train_step = recorded(training.train_step, rank_file)
    training.training_log = lambda *_, **__: False
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
