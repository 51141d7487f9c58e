# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Train a Nemotron VLM with its own layout for the encoder and for the language model.

    torchrun --nproc-per-node 4 examples/mimo/pretrain_nemotron_vlm.py \\
        --encoder tp=2,dp=2 --language tp=1,dp=4 --steps 20

``--help`` lists the options. Bad input ends every rank with exit code 2 and one line.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
sys.path.insert(0, str(ROOT))

from examples.mimo.nemotron_vlm.cli import parse_args  # noqa: E402
from examples.mimo.nemotron_vlm.errors import (  # noqa: E402
    BAD_INPUT,
    FAILED,
    RunFailed,
    UserError,
    report,
)

ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "localhost",
}
"""The environment of a single process started without torchrun, but for the port."""


def main(argv: list[str]) -> int:
    """Run the program; returns its exit code."""
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(ALONE, MASTER_PORT=_free_port())
    try:
        config = parse_args(argv, int(os.environ["WORLD_SIZE"]))
        if config.device == "cpu":
            from megatron.core import cpu_runtime

            cpu_runtime.install()
        from examples.mimo.nemotron_vlm.run import run

        run(config)
    except (UserError, RunFailed) as error:
        if os.environ["RANK"] == "0":
            report(str(error))
        return BAD_INPUT if isinstance(error, UserError) else FAILED
    return 0


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind((ALONE["MASTER_ADDR"], 0))
        return str(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
