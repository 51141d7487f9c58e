# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Train a Nemotron VLM with Megatron's own loop, in a layout of its own for each module.

    torchrun --nproc-per-node 4 examples/mimo/pretrain_nemotron_vlm.py \\
        --encoder tp=2,dp=2 --language tp=1,dp=4 --train-iters 20

Megatron's options are taken, but for those in ``nemotron_vlm/refusals.py``, each refused with its
reason; ``--help`` lists them. Bad input ends every rank with exit code 2 and one line.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
sys.path.insert(0, str(ROOT))

from examples.mimo.nemotron_vlm.errors import BAD_INPUT, UserError, report  # noqa: E402

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # any that is free
"""The environment of a single process started without torchrun."""

KERNELS = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "megatron-mimo")
"""Where kernels and what their tuning found are kept for the next run, by device and version."""

KEPT = {
    "TRITON_CACHE_AUTOTUNING": "1",
    "TRITON_CACHE_DIR": str(KERNELS / "triton"),
    "TORCHINDUCTOR_CACHE_DIR": str(KERNELS / "inductor"),
}
"""Read by Triton and PyTorch when they are imported."""

TORCH_ONLY = {"NVTE_FRAMEWORK": "pytorch"}
"""Keeps Transformer Engine from importing JAX, where that is installed too."""

GPU_KERNELS = ("apex", "causal_conv1d", "deep_ep", "fla", "flash_attn", "mamba_ssm")
GPU_KERNELS += ("transformer_engine", "transformer_engine_torch")
"""Packages as if not installed on CPU ranks, so that layers take what runs without a GPU."""


def uses_gpus(argv: list[str]) -> bool:
    """Whether a command line trains on GPUs.

    Other runs must not see any: libraries of kernels begin to use what they see when they are
    imported, and then the CPU runtime cannot take the place of CUDA.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--device", "--dry-run", "--plan"):
        parser.add_argument(name, nargs="?", const=name)
    asked = parser.parse_known_args(argv)[0]
    return asked.device == "cuda" and not (asked.dry_run or asked.plan)


def leave_out_compiler() -> None:
    """Without a GPU nothing is compiled, and PyTorch's compiler takes each rank seconds to import.

    Megatron asks for it while it is imported, before the CPU runtime can be there.
    """
    import torch

    def unchanged(function=None, **_):
        return function or unchanged

    if not torch.cuda.is_available():
        torch.compile = unchanged


def share_gpus() -> None:
    """Ranks of a host with fewer GPUs share them, where NCCL lets ranks do so."""
    import torch

    count = torch.cuda.device_count()
    if count:
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % count)


def main(argv: list[str]) -> int:
    """Run the program; returns its exit code."""
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(ALONE)
    os.environ.update(KEPT | TORCH_ONLY | os.environ)
    on_gpus = uses_gpus(argv)
    if on_gpus:
        share_gpus()
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        sys.modules.update(dict.fromkeys(GPU_KERNELS))  # before Megatron looks for them
    leave_out_compiler()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that Megatron can do without
            if not on_gpus:
                from megatron.core import cpu_runtime

                cpu_runtime.install()
            from examples.mimo.nemotron_vlm.run import run
        run(argv)
    except UserError as error:
        if error.rank is not None or os.environ["RANK"] == "0":
            report(str(error))
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
