# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The environment that CUDA, Triton, PyTorch and Transformer Engine read when they start.

This module imports none of them, so the program can set the environment before they start.
"""

import argparse
import os
from pathlib import Path

from examples.mimo.common.layout import PLANNED, SIZES, asked_layout, option_of
from examples.mimo.nemotron_vlm.options.config_file import with_config


def uses_gpus(argv: list[str]) -> bool:
    """Return whether a command line trains on GPUs.

    Other runs must see no GPU: kernel libraries use the GPUs that they see when they are imported,
    and then the CPU runtime cannot stand in for CUDA.
    """
    asked = _seen(argv)
    return asked.device == "cuda" and not (asked.dry_run or asked.plan)


def at_start(argv: list[str]) -> dict[str, str]:
    """Return the variables to set before those libraries are imported, without those already set.

    Raises:
        UserError: the language model's layout cannot be read.
    """
    asked = _seen(argv)
    is_planned = asked.language == PLANNED  # and its axes not known yet
    language = asked_layout(asked, "language", "" if is_planned else None)
    ahead = asked.cuda_graph_impl == "local"
    # Megatron asks for one connection with tensor or context parallelism; on a single one, a
    # kernel that waits for another rank holds back those behind it.
    single = is_planned or language.tp > 1 or language.cp > 1 or not ahead
    # Compiled kernels are kept for the next run, for each host apart: on a network file system,
    # replacing a file that another host reads leaves that host a stale handle, which ends the run.
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    kernels = home / "megatron-mimo" / os.uname().nodename
    found = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1" if single else "8",
        "NVTE_FRAMEWORK": "pytorch",  # else Transformer Engine imports JAX if it is installed
        "TRITON_CACHE_AUTOTUNING": "1",
        "TRITON_CACHE_DIR": str(kernels / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(kernels / "inductor"),
    }
    if ahead:
        # Loading a kernel later may wait for all work on the device, and so for another rank.
        found["CUDA_MODULE_LOADING"] = "EAGER"
    return {name: value for name, value in found.items() if name not in os.environ}


def _seen(argv: list[str]) -> argparse.Namespace:
    """Read the options that the environment depends on; the program's parser checks them later."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--device", "--cuda-graph-impl"):
        parser.add_argument(name, nargs="?")
    for name in ("--dry-run", "--plan"):
        parser.add_argument(name, nargs="?", const=1, type=_size)
    parser.add_argument("--language", nargs="?", default="", const="")
    for name in SIZES["language"].values():
        parser.add_argument(option_of(name), nargs="?", type=_size)
    return parser.parse_known_args(with_config(argv, parser))[0]


def _size(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
