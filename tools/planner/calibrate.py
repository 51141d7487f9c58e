# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measure a machine: train models of one kind of layer for some steps, and fit figures to it.

The planner's time of a step is linear in the inverse efficiencies and in the overheads. So each run
on one rank is one equation, whose coefficients are the planner's own prediction with one figure set
to 1 and the others to 0; non-negative least squares on relative errors solves them. Collectives are
timed between two ranks of this host.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from examples.mimo.nemotron_vlm.arguments import Options
from examples.mimo.nemotron_vlm.data.sample import most_tiles
from examples.mimo.nemotron_vlm.presets import VLMPreset, find_preset, write_preset
from planner.machine import Machine, find_machine
from planner.measure import measured, options_of
from planner.plan import Plan, Tiles
from planner.step_time import step_time

FREE = 1e30
"""An efficiency, or a bandwidth, that takes no time."""
LAYERS = 8
SMALL, LARGE = 4 * 2**10, 4 * 2**20
"""Bytes of the collectives that give latency and bandwidth."""
REPEATS = 20
USUAL_EFFICIENCY = {
    "gemm": 0.4,
    "attention": 0.1,
    "scan": 0.05,
    "delta": 0.05,
    "experts": 0.3,
    "vit": 0.4,
}
USUAL_OVERHEAD = 2e-3
DRAWN = 0.05
"""Where the fit begins, and how much it is drawn there: a run's error of 5 % costs as much as a
figure of twice the usual one."""
GRANULARITIES = {None: "none", "selective": "moe", "full": "full"}


def plan_of(options: Options, images: Tiles | None = None) -> Plan:
    """The plan that a command line of the program is; mock samples have as many tiles as fit."""
    args, preset = options.args, options.preset
    tiles = max(1, most_tiles(preset.encoder.tokens_per_tile, args.seq_length))
    return Plan(
        preset,
        options.layouts,
        images or Tiles(tiles),
        GRANULARITIES[args.recompute_granularity],
        args.recompute_encoder,
        args.encoder_macro_batch,
    )


def calibrate(model: str, device: str, gpu: str) -> Machine:
    """Measure this host.

    Args:
        model: whose layers are measured.
        device: cpu or cuda. gpu: of the table, whose peaks a cuda device has.
    """
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29577")
    machine = find_machine(gpu) if device == "cuda" else _of_this_cpu()
    if device == "cpu":
        from megatron.core import cpu_runtime

        cpu_runtime.install()
    plans, seconds = [], []
    with tempfile.TemporaryDirectory() as directory:
        for number, (preset, samples, micro) in enumerate(_cases(find_preset(model))):
            file = Path(directory) / f"{number}.json"
            write_preset(preset, file)
            batch = f"--global-batch-size {samples} --micro-batch-size {micro}"
            options = options_of([*f"--model {file} --device {device} {batch}".split()], 1)
            plans.append(plan_of(options))
            seconds.append(measured(options).seconds)
            pattern = preset.language.hybrid_layer_pattern
            print(f"{pattern}, {batch}: {seconds[-1]:.3f} s", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    return _with_collectives(fitted(machine, plans, seconds), device)


def _cases(base: VLMPreset) -> Iterator[tuple[VLMPreset, int, int]]:
    """Models, and samples of a step and of a microbatch."""

    def of(pattern: str, **sizes) -> VLMPreset:
        return replace(base, language=replace(base.language, hybrid_layer_pattern=pattern, **sizes))

    kinds = set(base.language.hybrid_layer_pattern) - {"|"}
    deep = replace(base, encoder=replace(base.encoder, layers=3 * base.encoder.layers))
    for samples, micro in ((2, 2), (4, 2), (6, 6)):
        yield base, samples, micro
    for kind in sorted(kinds):
        for samples in (2, 6):
            yield of(kind * LAYERS), samples, samples
    yield of("E" * LAYERS, num_experts=base.language.num_experts // 2), 2, 2
    yield of("*", vocab_size=8 * base.language.vocab_size), 4, 4
    for samples in (2, 6):
        yield deep, samples, samples


def _of_this_cpu() -> Machine:
    """A rank on one core of this host, with nothing fitted yet."""
    size, side = 512, 2 * 512**3
    matrix = torch.rand(size, size)
    torch.set_num_threads(1)
    matrix @ matrix
    begin = time.process_time()
    for _ in range(REPEATS):
        matrix @ matrix
    peak = REPEATS * side / (time.process_time() - begin)
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / cores
    return Machine(
        source=f"calibrated: ranks on {cores} CPU cores, fp32, in processor time",
        peak_flops=peak,
        memory_bytes=memory,
        memory_bandwidth=0.0,
        node_bandwidth=1.0,
        network_bandwidth=1.0,
        link_efficiency=1.0,
        node_latency=0.0,
        network_latency=0.0,
        efficiency={},
        overhead={},
        microbatch_overhead=0.0,
        step_overhead=0.0,
        optimizer_bandwidth=FREE,
        fused=False,
        precision=4,
        shared_cores=cores,
    )


def fitted(machine: Machine, plans: list[Plan], seconds: list[float]) -> Machine:
    """The machine whose predictions are closest to what was measured, relatively."""
    kinds = set("".join(plan.preset.language.hybrid_layer_pattern for plan in plans)) - {"|"}
    usual = {("efficiency", kind): 1 / share for kind, share in USUAL_EFFICIENCY.items()}
    usual |= {("overhead", kind): USUAL_OVERHEAD for kind in (*sorted(kinds), "vit", "head")}
    usual |= {("overhead", "expert"): USUAL_OVERHEAD / 4, ("optimizer_bandwidth", ""): 1e-9}
    usual |= {(name, ""): 10 * USUAL_OVERHEAD for name in ("microbatch_overhead", "step_overhead")}
    free = replace(
        machine,
        memory_bandwidth=0.0,
        efficiency=dict.fromkeys(USUAL_EFFICIENCY, FREE),
        overhead={kind: 0.0 for group, kind in usual if group == "overhead"},
        microbatch_overhead=0.0,
        step_overhead=0.0,
        optimizer_bandwidth=FREE,
        shared_cores=0,
    )
    rows = np.array(
        [
            [
                step_time(plan, _with(free, {name: value}), 1).seconds
                for name, value in usual.items()
            ]
            for plan in plans
        ]
    )
    # In units of the usual figures, to which those that the runs do not tell apart are drawn.
    equations = np.vstack([rows / np.array(seconds)[:, None], DRAWN * np.eye(len(usual))])
    factors, _ = nnls(equations, np.append(np.ones(len(plans)), DRAWN * np.ones(len(usual))))
    figures = {name: value * usual[name] for name, value in zip(usual, factors, strict=True)}
    source = f"{machine.source.split(';')[0]}; {len(plans)} runs on one rank"
    return _with(replace(free, shared_cores=machine.shared_cores, source=source), figures)


def _with_collectives(machine: Machine, device: str) -> Machine:
    latency, bandwidth = _collectives(device)
    return replace(
        machine,
        node_bandwidth=bandwidth,
        network_bandwidth=bandwidth,
        link_efficiency=1.0,
        node_latency=latency,
        network_latency=latency,
    )


def _with(machine: Machine, figures: dict[tuple[str, str], float]) -> Machine:
    """The machine with figures set; efficiencies and bandwidths are given inverse."""
    changed = asdict(machine)
    for (group, kind), value in figures.items():
        if group in ("efficiency", "optimizer_bandwidth"):
            value = 1 / value if value > 1 / FREE else FREE
        if kind:
            changed[group][kind] = float(value)
        else:
            changed[group] = float(value)
    return Machine(**changed)


def _collectives(device: str) -> tuple[float, float]:
    """Latency and bytes a second of a rank's all-gather, of two ranks of this host."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        machine = find_machine("h200")
        return machine.node_latency, machine.node_speed
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", "-m", "planner.calibrate", device]
    done = subprocess.run(launch, capture_output=True, text=True, check=True)
    small, large = map(float, done.stdout.split()[-2:])
    return small, (LARGE - SMALL) / 2 / max(large - small, 1e-9)


def _time_collectives(device: str) -> None:
    """On one of two ranks: print the seconds of a small and a large all-gather."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.set_default_device(f"cuda:{dist.get_rank()}" if device == "cuda" else "cpu")
    clock = time.perf_counter if device == "cuda" else time.process_time
    taken = []
    for size in (SMALL, LARGE):
        mine = torch.zeros(size // 8)
        everything = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(everything, mine)
        begin = clock()
        for _ in range(REPEATS):
            dist.all_gather(everything, mine)
        float(everything[0][0])  # waits for the device
        taken.append((clock() - begin) / REPEATS)
    if dist.get_rank() == 0:
        print(*taken)
    dist.destroy_process_group()


if __name__ == "__main__":
    _time_collectives(sys.argv[1])
