# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The training program, whose second rank is killed or hangs while it saves the fourth step."""

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
from megatron.training import training  # noqa: E402

FAULTS = {
    "killed while writing": (TorchDistSaveShardedStrategy, "save"),
    "hangs when all is written": (serialization, "save_manifest"),
}
"""Functions in which the fault strikes."""


def train(fault: str, arguments: list[str]) -> None:
    """Train as one rank."""
    owner, name = FAULTS[fault]
    original = getattr(owner, name)

    @functools.wraps(original)
    def faulty(*given, **named):
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        step = training.get_args().curr_iteration + 1
        if is_first and (os.environ["RANK"], step) == ("1", 4):
            os.kill(os.getpid(), signal.SIGKILL) if "killed" in fault else time.sleep(10**6)
        return original(*given, **named)

    setattr(owner, name, faulty)
    if code := main(arguments):
        sys.exit(code)
