# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The environment that CUDA, Triton, PyTorch and Transformer Engine read when they start.

This module imports none of them, so the program can set the environment before they start.
"""

import argparse
import os
import re
from pathlib import Path

from examples.mimo.common.config_file import with_config


def at_start(argv: list[str]) -> tuple[bool, dict[str, str]]:
    """Return whether a command line trains on GPUs, and the variables to set for it.

    Other runs must see no GPU: kernel libraries use the GPUs that they see when they are imported,
    and then the CPU runtime cannot stand in for CUDA. Variables that are set already are kept.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    names = "device cuda-graph-impl dry-run plan language tensor-model-parallel-size"
    for name in f"{names} context-parallel-size".split():
        parser.add_argument(f"--{name}", nargs="?", const="1")
    asked = parser.parse_known_args(with_config(argv, parser))[0]
    ahead = asked.cuda_graph_impl == "local"
    # Megatron asks for one connection with tensor or context parallelism; on a single one, a
    # kernel that waits for another rank holds back those behind it.
    sizes = re.findall(r"\b[tc]p=(\d+)", asked.language or "")
    sizes += [asked.tensor_model_parallel_size or "1", asked.context_parallel_size or "1"]
    single = not ahead or asked.language == "planned" or {*sizes} != {"1"}
    # Compiled kernels are kept for the next run, for each host apart: on a network file system,
    # replacing a file that another host reads leaves that host a stale handle, which ends the run.
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    kernels = home / "megatron-mimo" / os.uname().nodename
    variables = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1" if single else "8",
        "NVTE_FRAMEWORK": "pytorch",  # else Transformer Engine imports JAX if it is installed
        "TRITON_CACHE_AUTOTUNING": "1",
        "TRITON_CACHE_DIR": str(kernels / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(kernels / "inductor"),
    }
    # Loading a kernel later may wait for all work on the device, and so for another rank.
    variables |= {"CUDA_MODULE_LOADING": "EAGER"} if ahead else {}
    uses_gpus = asked.device == "cuda" and not (asked.dry_run or asked.plan)
    return uses_gpus, {name: v for name, v in variables.items() if name not in os.environ}
