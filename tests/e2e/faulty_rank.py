# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The training program as a rank that may have a fault, at the place that the fault names.

A fault is a dictionary: rank, at (PLACES), iteration, kind.
"""

import contextlib
import functools
import os
import signal
import sys
import time

from megatron.core import cpu_runtime  # noqa: E402

cpu_runtime.install()

from examples.mimo.pretrain_nemotron_vlm import main  # noqa: E402
from megatron.core.dist_checkpointing import serialization  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy  # noqa: E402
from megatron.core.models.mimo.optimizer import MimoOptimizer  # noqa: E402
from megatron.training import training  # noqa: E402

PLACES = {
    "optimizer": (MimoOptimizer, "step"),
    "writing": (TorchDistSaveShardedStrategy, "save"),
    "publishing": (serialization, "save_manifest"),
}


def strike(kind: str) -> None:
    """Carry out the fault."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hang":
        while True:
            time.sleep(1)
    elif kind == "full":
        with contextlib.suppress(OSError), open(f"{training.get_args().save}/rest", "wb") as file:
            while True:
                file.write(bytes(2**16))


def train(fault: dict | None, arguments: list[str]) -> None:
    """Train as one rank, which has the fault, if there is one, if it is the fault's rank."""
    if fault:
        set_fault(fault)
    if code := main(arguments):
        sys.exit(code)


def set_fault(fault: dict) -> None:
    """Make the fault strike where and when it says."""
    owner, name = PLACES[fault["at"]]
    original, struck = getattr(owner, name), []

    @functools.wraps(original)
    def faulty(*arguments, **named):
        now = training.get_args().curr_iteration + 1
        here = int(os.environ["RANK"]) == fault["rank"] and now == fault["iteration"]
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if here and not restarted and not struck:
            struck.append(now)
            strike(fault["kind"])
        return original(*arguments, **named)

    setattr(owner, name, faulty)
