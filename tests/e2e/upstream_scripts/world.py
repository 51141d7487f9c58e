# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run scripts of the tree in the working directory on CPU ranks; Megatron is imported once.

Each line of standard input asks for a run: JSON with ``ranks``, ``command`` (a script and its
arguments) and ``log``, a file for the ranks' output. The answer is a line with the exit status of
the first rank that failed, else 0.
"""

import functools
import gc
import inspect
import json
import os
import runpy
import signal
import socket
import sys
from argparse import ArgumentParser
from importlib import import_module

import stand_ins

IMPORTED_ONCE = (
    "examples.mimo.pretrain_mimo",
    "megatron.core.tokenizers.text",
    "megatron.training.arguments",
    "scipy.optimize",  # imported by a colocated bridge
    "torch._dynamo",  # imported by any optimizer, though nothing is compiled
    "torch.utils.tensorboard",
)


def main() -> None:
    """Answer until standard input ends; in a rank, run the script and return."""
    sys.path[0] = os.getcwd()
    stand_ins.install()
    for module in IMPORTED_ONCE:
        import_module(module)
    read_options_once()
    gc.freeze()  # what is imported stays shared with the ranks
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        asked = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        ranks = set()
        for rank in range(asked["ranks"]):
            process = os.fork()
            if process == 0:
                return run_rank(rank, port, **asked)
            ranks.add(process)
        print(ended(ranks), file=answers)


def read_options_once() -> None:
    """Keep the texts of Megatron's options, which it reads from its sources at each parsing."""
    inspect.getsource = functools.cache(inspect.getsource)
    import_module("megatron.training.arguments").add_megatron_arguments(ArgumentParser())


def run_rank(rank: int, port: int, ranks: int, command: list[str], log: str) -> None:
    """Become a rank, as torchrun starts one."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
    if writer := import_module("megatron.training.global_vars").get_tensorboard_writer():
        writer.close()  # a thread may still have its last values


def ended(ranks: set[int]) -> int:
    """Wait for all ranks; when one fails, end the others."""
    failed = 0
    while ranks:
        process, status = os.wait()
        ranks.remove(process)
        if status and not failed:
            failed = os.waitstatus_to_exitcode(status)
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    main()
