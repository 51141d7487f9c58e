# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run scripts of the tree in the working directory on CPU ranks; Megatron is imported once.

Each line of standard input asks for a run: JSON with ``ranks``, ``command`` (a script and its
arguments) and ``log``, a file for the output of the ranks. The answer is a line, 0 if all end well.
"""

import functools
import inspect
import json
import os
import runpy
import sys
import traceback
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path

import stand_ins

sys.path.append(str(Path(__file__).parents[2]))  # upstream has a package "tests" of its own

from agent import run_ranks  # noqa: E402

IMPORTED_ONCE = (
    "examples.mimo.pretrain_mimo",
    "megatron.core.tokenizers.text",
    "megatron.training.arguments",
    "scipy.optimize",  # imported by a colocated bridge
    "torch._dynamo",  # imported by any optimizer, though nothing is compiled
    "torch.utils.tensorboard",
)


def main() -> None:
    """Answer until standard input ends."""
    sys.path[0] = os.getcwd()
    stand_ins.install()
    for module in IMPORTED_ONCE:
        import_module(module)
    read_options_once()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        asked = json.loads(line)
        print(run_ranks(asked["ranks"], run_rank, asked["command"], asked["log"]), file=answers)


def read_options_once() -> None:
    """Keep the texts of Megatron's options, which it reads from its sources at each parsing."""
    inspect.getsource = functools.cache(inspect.getsource)
    import_module("megatron.training.arguments").add_megatron_arguments(ArgumentParser())


def run_rank(command: list[str], log: str) -> None:
    """Run the script as a rank that torchrun has started."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    except Exception:
        traceback.print_exc()  # into the log: the agent keeps it from the rank's output
        raise
    if writer := import_module("megatron.training.global_vars").get_tensorboard_writer():
        writer.close()  # a thread may still have its last values


if __name__ == "__main__":
    main()
