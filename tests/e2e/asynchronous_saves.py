# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The training program on one CPU rank, with saves written by another process.

    python -m tests.e2e.asynchronous_saves [program arguments]

The program refuses such saves on a CPU, because training would change the tensors while they are
written. Here nothing is trained after the last save. A pause before each step leaves the processor
to the process that writes.
"""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron.core import cpu_runtime  # noqa: E402

cpu_runtime.install()  # also in the writing process, which imports this file

from examples.mimo.nemotron_vlm.options.rules import RULES  # noqa: E402
from examples.mimo.pretrain_nemotron_vlm import main  # noqa: E402
from megatron.training import training  # noqa: E402

PAUSE_S = 0.2


def pausing(function: Callable) -> Callable:
    """Pause before each call."""

    @functools.wraps(function)
    def paused(*args, **named):
        time.sleep(PAUSE_S)
        return function(*args, **named)

    return paused


# The writing process finds this file: the program has put its checkout first.
sys.path.insert(0, str(Path(__file__).parents[2]))

if __name__ == "__main__":
    (on_cpu,) = [rule for rule in RULES if rule.title == "--async-save"]
    RULES.remove(on_cpu)
    training.train_step = pausing(training.train_step)
    sys.exit(main(sys.argv[1:]))
