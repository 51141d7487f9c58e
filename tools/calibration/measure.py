# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measure short runs of the training program on a GPU of this host, and collectives on two.

``torchrun -m calibration.measure FILE`` times the collectives; rank 0 writes the file.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from examples.mimo import pretrain_nemotron_vlm
from examples.mimo.common.errors import BAD_INPUT, UserError

STEPS, WARM_UP = 10, 2
"""Steps of a run, and how many of the first ones are not timed."""
ROUNDS = 3
"""Times that the collectives are timed; the median counts."""
SIZES = (2**12, 2**26)
"""Approximate bytes of the collectives, of which few give the latency and many the bandwidth."""
REPEATS, MATRIX = 50, 512
"""Collectives in a row, and rows of the matrices multiplied before each, as training has it."""

Figures = dict[str, float]
"""Figures of a run: ``seconds`` of its fastest step, ``peak_bytes`` of tensors."""


def measure_run(line: list[str], environment: dict[str, str]) -> Figures | None:
    """Run a command line of the program on one GPU; a run that fails has no figures."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "metrics.jsonl")
        rest = ["--data", "mock", "--train-iters", str(STEPS), "--metrics-out", str(file)]
        command = [sys.executable, pretrain_nemotron_vlm.__file__, *line, *rest]
        code = subprocess.run(command, env=environment).returncode
        if code == BAD_INPUT:
            raise UserError("the program refuses to measure here, as the line above says")
        if code:
            return None
        records = [json.loads(record) for record in file.read_text().splitlines()]
    seconds = min(record["step_time_s"] for record in records[WARM_UP:])
    return {"seconds": seconds, "peak_bytes": records[-1]["memory_gib"] * 2**30}


def measure_collectives(environment: dict[str, str]) -> list[dict]:
    """Time collectives between two GPUs of this host, if it has them."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measured.json")
        subprocess.run([*launch, "2", "-m", "calibration.measure", file], env=environment)
        return json.loads(file.read_text()) if file.exists() else []


def timed_collectives() -> list[dict]:
    """Time small and large collectives on this rank.

    The seconds are the mean of an all-gather's and a reduce-scatter's.
    """
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks, matrix = dist.get_world_size(), torch.rand(MATRIX, MATRIX, device="cuda")

    def seconds(whole: torch.Tensor, part: torch.Tensor, communicates: bool) -> float:
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(REPEATS):
            matrix @ matrix
            if communicates:
                dist.all_gather_into_tensor(whole, part)
            matrix @ matrix
            if communicates:
                dist.reduce_scatter_tensor(part, whole)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / REPEATS / 2

    taken = []
    for size in SIZES:
        part = torch.zeros(size // 4 // ranks, device="cuda")
        whole = part.repeat(ranks)
        seconds(whole, part, True)  # warms up
        more = [seconds(whole, part, True) - seconds(whole, part, False) for _ in range(ROUNDS)]
        taken.append({"ranks": ranks, "bytes": whole.nbytes, "seconds": median(more)})
    return taken


if __name__ == "__main__":
    found = timed_collectives()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found) + "\n")
    dist.destroy_process_group()
