# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measure a machine: train models of one kind of layer for some steps, and fit figures to it.

Each run on one rank is compared with the planner's own prediction, and least squares of the
relative errors find the efficiencies and overheads. Collectives are timed between two ranks.

What was measured is kept beside what was fitted: a case that the file has is not run again.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import least_squares

from calibration.measure import measured, options_of
from examples.mimo.nemotron_vlm.errors import UserError
from examples.mimo.nemotron_vlm.layout import Batch, Layout
from examples.mimo.nemotron_vlm.layout_rules import resolve
from examples.mimo.nemotron_vlm.placement import COLOCATED
from examples.mimo.nemotron_vlm.planner.machine import Machine, find_machine, write_machine
from examples.mimo.nemotron_vlm.planner.plan import Plan, most_that_fit
from examples.mimo.nemotron_vlm.planner.step_time import step_time
from examples.mimo.nemotron_vlm.presets import VLMPreset, find_preset, write_preset
from examples.mimo.nemotron_vlm.recurrent_cp import STATE_PASSING
from megatron.training.global_vars import unset_global_variables

LAYERS = 8
SMALLER = {"num_experts": 16, "vocab_size": 32768}
"""At most so many: widths matter, and what does not fit one GPU does not."""
SEQ_LENGTH = 4096
"""At most."""
SAMPLES = 4
"""Of the larger microbatches; the smaller ones have one."""
SMALL = 2**12
LARGE = {"cpu": 2**22, "cuda": 2**26}
"""Bytes of the collectives that give latency and bandwidth."""
REPEATS = 20
ON_GPU = (
    "--bf16 --num-workers 8 --moe-grouped-gemm --moe-router-fusion --moe-permute-fusion "
    "--use-fused-weighted-squared-relu --cross-entropy-loss-fusion --rerun-mode disabled"
)
"""As large runs have it; with data made ahead."""
WORK_OF = {"*": "attention", "M": "scan", "G": "delta", "E": "experts"}
"""Work that only layers of a kind have."""
USUAL = {
    "cpu": {
        "efficiency": dict(gemm=0.4, attention=0.1, scan=0.01, delta=0.01, experts=0.3, vit=0.4),
        "overhead": dict.fromkeys(["*", "M", "G", "E", "-", "vit", "head"], 2e-3)
        | {"expert": 5e-4},
        "microbatch_overhead": 0.01,
        "step_overhead": 0.01,
        "optimizer_bandwidth": 1e9,
        "launches_ahead": False,
    },
    "cuda": {
        "efficiency": dict(gemm=0.65, attention=0.5, scan=0.1, delta=0.1, experts=0.4, vit=0.55),
        "overhead": {"*": 2e-3, "M": 4e-3, "G": 4e-3, "E": 8e-3, "-": 1e-3, "vit": 1e-3}
        | {"head": 3e-3, "expert": 2e-4},
        "microbatch_overhead": 0.01,
        "step_overhead": 0.03,
        "optimizer_bandwidth": 2.4e12,
        "launches_ahead": True,
    },
}
"""Figures of a machine where the fit begins; what the runs do not tell stays there."""
HIGHEST = 0.8
"""Share of the peak that large matrix products reach; no efficiency is fitted above."""
DRAWN = 0.03
"""How much a figure is drawn to where the fit begins: a run's error of 3 % costs as much as a
figure that is e times as large."""


@dataclass(frozen=True)
class Case:
    """A run on one rank: sizes in the place of the base model's, samples of a step and of a part.

    encoder_layers: of the ViT. The others are as in the presets.
    """

    hybrid_layer_pattern: str
    encoder_layers: int
    num_experts: int
    vocab_size: int
    seq_length: int
    samples: int
    micro: int

    def preset(self, base: VLMPreset) -> VLMPreset:
        """The base model with these sizes."""
        language = replace(
            base.language,
            hybrid_layer_pattern=self.hybrid_layer_pattern,
            num_experts=self.num_experts,
            vocab_size=self.vocab_size,
        )
        encoder = replace(base.encoder, layers=self.encoder_layers)
        return replace(base, encoder=encoder, language=language, seq_length=self.seq_length)

    def plan(self, base: VLMPreset) -> Plan:
        """What the planner prices."""
        preset, batch = self.preset(base), Batch(self.samples, self.micro, self.seq_length)
        layouts = resolve(Layout(), Layout(), batch, 1, preset, COLOCATED, STATE_PASSING)
        return Plan(preset, layouts, most_that_fit(preset, self.seq_length))


def calibrate(model: str, device: str, gpu: str, file: Path) -> None:
    """Measure this host, and write the machine and what it was fitted to.

    Args:
        model: whose layers are measured.
        device: cpu or cuda. gpu: of the table, whose peaks a cuda device has.
        file: to write, after each run; of an earlier call, to go on with.
    """
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    base = find_preset(model)
    kept = json.loads(file.read_text()) if file.exists() else {}
    runs = kept.get("runs", [])
    machine = replace(find_machine(gpu), **USUAL["cuda"]) if device == "cuda" else _of_this_cpu()
    if device == "cpu":
        from megatron.core import cpu_runtime

        cpu_runtime.install()
    done = [Case(**run["case"]) for run in runs]
    for case in _cases(base):
        if case in done or not (found := _run(case, base, device)):
            continue
        runs.append({"case": asdict(case)} | found)
        file.write_text(json.dumps(kept | {"runs": runs}) + "\n")
    if not runs:
        raise UserError(f"--device {device}: none of the runs that measure it worked")
    if dist.is_initialized():
        dist.destroy_process_group()
    if "collectives" not in kept:
        kept["collectives"] = _collectives(device)
    found = fitted(machine, [Case(**run["case"]).plan(base) for run in runs], runs)
    source = f"{machine.source.split(';')[0]}; {len(runs)} runs on one rank"
    found = replace(found, source=source, shared_cores=machine.shared_cores)
    write_machine(_with_collectives(found, kept["collectives"]), file, kept | {"runs": runs})


def _cases(base: VLMPreset) -> Iterator[Case]:
    """Each kind of layer alone at two sizes, the encoder alone, and the model as it is."""
    p = base.language
    sizes = {name: min(most, getattr(p, name)) for name, most in SMALLER.items()}
    sizes["seq_length"] = min(SEQ_LENGTH, base.seq_length)
    pattern = p.hybrid_layer_pattern.replace("|", "")[:LAYERS]
    deep, thin = base.encoder.layers, max(1, base.encoder.layers // 16)

    def of(layers: str, encoder: int, samples: int, micro: int, **changed: int) -> Case:
        return Case(layers, encoder, samples=samples, micro=micro, **sizes | changed)

    yield of(pattern, deep, 2, 1)
    yield of(pattern, deep, 4, 2)
    for kind in sorted(set(pattern)):
        for samples in (1, SAMPLES):
            yield of(kind * LAYERS, thin, samples, samples)
    yield of("*" * LAYERS, thin, 2, 2, seq_length=2 * sizes["seq_length"])
    yield of("E" * LAYERS, thin, 4, 2, num_experts=sizes["num_experts"] // 2)
    yield of("*", deep, 1, 1)
    yield of("*", deep, 4, 2)
    yield of("*", thin, 2, 2, vocab_size=4 * sizes["vocab_size"])


def _run(case: Case, base: VLMPreset, device: str) -> dict[str, float] | None:
    """Seconds of a step and peak bytes of a case; None where it fails, which is said."""
    name = " ".join(f"{key}={value}" for key, value in asdict(case).items())
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.json"
        write_preset(case.preset(base), file)
        line = f"--model {file} --device {device} --global-batch-size {case.samples} "
        line += f"--micro-batch-size {case.micro} {ON_GPU if device == 'cuda' else ''}"
        try:
            found = measured(options_of(line.split(), 1))
        except Exception as error:  # of any kind: the other cases are worth their time
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            found = None
    if not found:
        unset_global_variables()
    gc.collect()
    torch.cuda.empty_cache()
    if not found:
        return None
    taken = time.perf_counter() - begin
    text = f"{name}: {found.seconds:.4f} s, {found.peak_bytes / 1e9:.2f} GB"
    print(f"{text}; all of it took {taken:.0f} s", file=sys.stderr, flush=True)
    return {"seconds": found.seconds, "peak_bytes": found.peak_bytes}


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
        node_bandwidth=1.0,
        network_bandwidth=1.0,
        link_efficiency=1.0,
        node_latency=0.0,
        network_latency=0.0,
        **USUAL["cpu"],
        fused=False,
        precision=4,
        shared_cores=cores,
    )


def fitted(machine: Machine, plans: list[Plan], runs: list[dict]) -> Machine:
    """The machine whose predictions are closest to what was measured, relatively.

    Its figures are drawn to the machine's, which decide those that the runs do not tell apart.
    """
    kinds = set("".join(plan.preset.language.hybrid_layer_pattern for plan in plans)) - {"|"}
    work = ["gemm", "vit", *(WORK_OF[kind] for kind in sorted(kinds) if kind in WORK_OF)]
    figures = [("efficiency", kind) for kind in work]
    figures += [("overhead", kind) for kind in (*sorted(kinds), "expert", "vit", "head")]
    figures += [(name, "") for name in ("microbatch_overhead", "step_overhead")]
    figures += [("optimizer_bandwidth", "")]
    machine = replace(machine, shared_cores=0)
    seconds = np.array([run["seconds"] for run in runs])

    def scaled(logarithms: np.ndarray) -> Machine:
        changed = asdict(machine)
        for (group, kind), factor in zip(figures, np.exp(logarithms), strict=True):
            place, key = (changed[group], kind) if kind else (changed, group)
            place[key] = float(place[key] * factor)
        return Machine(**changed)

    def misses(logarithms: np.ndarray) -> np.ndarray:
        guess = scaled(logarithms)
        predicted = np.array([step_time(plan, guess, 1).seconds for plan in plans])
        return np.append(predicted / seconds - 1, DRAWN * logarithms)

    highest = [
        np.log(HIGHEST / machine.efficiency[kind]) if group == "efficiency" else np.inf
        for group, kind in figures
    ]
    found = least_squares(misses, np.zeros(len(figures)), bounds=(-np.inf, highest))
    return scaled(found.x)


def _with_collectives(machine: Machine, measured: list[dict]) -> Machine:
    """The machine with the latency and bandwidth of collectives, where they were measured."""
    if not measured:
        return machine
    small, large = (
        np.mean([one["seconds"] for one in measured if (one["bytes"] == SMALL) == is_small])
        for is_small in (True, False)
    )
    size = max(one["bytes"] for one in measured)
    bandwidth = (size - SMALL) / 2 / max(large - small, 1e-9)
    return replace(
        machine,
        node_bandwidth=bandwidth,
        network_bandwidth=bandwidth,
        link_efficiency=1.0,
        node_latency=small,
        network_latency=small,
    )


def _collectives(device: str) -> list[dict]:
    """Seconds of collectives of two ranks of this host; none with one GPU."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        return []
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", "-m", "calibration.calibrate", device]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(launch, capture_output=True, text=True, env=environment)
    if done.returncode:
        print(f"collectives: {done.stderr[-500:]}", file=sys.stderr)
        return []
    return json.loads(done.stdout.splitlines()[-1])


def _time_collectives(device: str) -> None:
    """On one of two ranks: print what small and large collectives take."""
    rank, on_gpu = int(os.environ["LOCAL_RANK"]), device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    clock = time.perf_counter if on_gpu else time.process_time
    taken = []
    for size in (SMALL, LARGE[device]):
        whole, part = torch.zeros(size // 4), torch.zeros(size // 8)
        ways = {
            "all-gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
            "reduce-scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(
                part, whole
            ),
            "all-to-all": lambda whole=whole: dist.all_to_all_single(whole.clone(), whole),
        }
        for name, collective in ways.items():
            for count in (5, REPEATS):  # the first ones warm up
                dist.barrier()
                float(whole[0])  # waits for the device
                begin = clock()
                for _ in range(count):
                    collective()
                float(whole[0])
                seconds = (clock() - begin) / count
            taken.append({"collective": name, "bytes": size, "seconds": seconds})
    if rank == 0:
        print(json.dumps(taken))
    dist.destroy_process_group()


if __name__ == "__main__":
    _time_collectives(sys.argv[1])
