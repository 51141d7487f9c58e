# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measure a machine: train models of one kind of layer for some steps, and fit figures to it.

The planner's time of a step is linear in the inverse efficiencies and in the overheads. So each run
on one rank is one equation, whose coefficients are the planner's own prediction with one figure set
to 1 and the others to 0; non-negative least squares on relative errors solves them. Collectives are
timed between two ranks of this host.

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
from scipy.optimize import nnls

from examples.mimo.nemotron_vlm.arguments import Options
from examples.mimo.nemotron_vlm.data.sample import most_tiles
from examples.mimo.nemotron_vlm.errors import UserError
from examples.mimo.nemotron_vlm.layout import Batch, Layout
from examples.mimo.nemotron_vlm.layout_rules import resolve
from examples.mimo.nemotron_vlm.placement import COLOCATED
from examples.mimo.nemotron_vlm.presets import VLMPreset, find_preset, write_preset
from examples.mimo.nemotron_vlm.recurrent_cp import STATE_PASSING
from megatron.training.global_vars import unset_global_variables
from planner.machine import Machine, find_machine, write_machine
from planner.measure import measured, options_of
from planner.plan import Plan, Tiles
from planner.step_time import step_time

FREE = 1e30
"""An efficiency, or a bandwidth, that takes no time."""
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
        return Plan(preset, layouts, _mock_tiles(preset, self.seq_length))


def plan_of(options: Options) -> Plan:
    """The plan that a command line of the program is, with mock samples."""
    args, preset = options.args, options.preset
    return Plan(
        preset,
        options.layouts,
        _mock_tiles(preset, args.seq_length),
        GRANULARITIES[args.recompute_granularity],
        args.recompute_encoder,
        args.encoder_macro_batch,
    )


def _mock_tiles(preset: VLMPreset, seq_length: int) -> Tiles:
    """Mock samples have as many as fit."""
    return Tiles(max(1, most_tiles(preset.encoder.tokens_per_tile, seq_length)))


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
    machine = find_machine(gpu) if device == "cuda" else _of_this_cpu()
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
    machine = fitted(machine, [Case(**run["case"]).plan(base) for run in runs], runs)
    write_machine(_with_collectives(machine, kept["collectives"]), file, kept | {"runs": runs})


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


def fitted(machine: Machine, plans: list[Plan], runs: list[dict]) -> Machine:
    """The machine whose predictions are closest to what was measured, relatively."""
    seconds = [run["seconds"] for run in runs]
    kinds = set("".join(plan.preset.language.hybrid_layer_pattern for plan in plans)) - {"|"}
    shares = USUAL_EFFICIENCY | machine.efficiency
    usual = {("efficiency", kind): 1 / share for kind, share in shares.items()}
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
    overhead = machine.overhead | free.overhead  # of kinds of layers that no run has, the old ones
    found = replace(free, shared_cores=machine.shared_cores, source=source, overhead=overhead)
    return _with(found, figures)


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


def _collectives(device: str) -> list[dict]:
    """Seconds of collectives of two ranks of this host; none with one GPU."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        return []
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", "-m", "planner.calibrate", device]
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
