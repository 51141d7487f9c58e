# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Train a Nemotron VLM with Megatron's own loop, each module in its own parallel layout.

    torchrun --nproc-per-node 4 examples/mimo/pretrain_nemotron_vlm.py \\
        --encoder tp=2,dp=2 --language tp=1,dp=4 --train-iters 20

Megatron's options are taken, except those in ``common/megatron_rules.py`` and
``nemotron_vlm/options/rules.py``, each of which is refused with a reason;
``--help-all`` lists them.
Bad input ends every rank with exit code 2 and one line.
"""

import argparse
import os
import re
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
sys.path.insert(0, str(ROOT))

from examples.mimo.common.allocator import has_expandable_segments  # noqa: E402
from examples.mimo.common.config_file import with_config  # noqa: E402
from examples.mimo.common.errors import end_rank  # noqa: E402
from examples.mimo.common.standing import end_quietly  # noqa: E402

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # any free port
ALONE |= {"TORCHELASTIC_USE_AGENT_STORE": "False"}  # an agent's store has a port of its own
"""The environment of a single process that meets no others, also where an agent started it."""

GPU_KERNELS = ("apex", "causal_conv1d", "deep_ep", "fla", "flash_attn", "mamba_ssm")
GPU_KERNELS += ("transformer_engine", "transformer_engine_torch")
"""Packages hidden from CPU ranks, so that layers choose implementations that need no GPU."""


def at_start(argv: list[str]) -> tuple[bool, dict[str, str]]:
    """Return whether a command line trains on GPUs, and the variables to set for it.

    CUDA, Triton, PyTorch and Transformer Engine read them when they start: call it before one is
    imported. Other runs must see no GPU: kernel libraries use the GPUs that they see when they are
    imported, and then the CPU runtime cannot stand in for CUDA. Variables that are set already are
    kept.
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
    # Megatron asks for it beside graphs, to avoid illegal memory accesses.
    variables |= {"NCCL_GRAPH_REGISTER": "0"} if ahead and has_expandable_segments() else {}
    uses_gpus = asked.device == "cuda" and not (asked.dry_run or asked.plan)
    return uses_gpus, {name: v for name, v in variables.items() if name not in os.environ}


def leave_out_compiler() -> None:
    """Replace ``torch.compile`` without a GPU: importing PyTorch's compiler takes each rank
    seconds.

    Megatron calls it while being imported, before the CPU runtime can be installed.
    """
    import torch

    def unchanged(function=None, **_):
        return function or unchanged

    if not torch.cuda.is_available():
        torch.compile = unchanged


def share_gpus() -> None:
    """Let the ranks of a host with fewer GPUs share them, if NCCL permits it."""
    import torch

    count = torch.cuda.device_count()
    if count:
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % count)


def main(argv: list[str]) -> int:
    """Run the program; returns its exit code."""
    end_quietly(is_alone="RANK" not in os.environ)
    if "RANK" not in os.environ:
        os.environ.update(ALONE)
    try:
        on_gpus, environment = at_start(argv)
        os.environ.update(environment)
        if os.environ["RANK"] == "0":
            print("importing PyTorch and Megatron", file=sys.stderr, flush=True)
        if on_gpus:
            share_gpus()
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            sys.modules.update(dict.fromkeys(GPU_KERNELS))  # before Megatron looks for them
        leave_out_compiler()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about packages that Megatron can do without
            if on_gpus:
                from examples.mimo.common.kernel_choices import keep_choices

                keep_choices()
            else:
                from megatron.core import cpu_runtime

                cpu_runtime.install()
            from examples.mimo.nemotron_vlm.loop.run import run
        run(argv)
    except (Exception, SystemExit) as error:
        return end_rank(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
