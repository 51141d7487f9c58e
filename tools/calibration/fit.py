# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fit a machine's figures to runs on one rank, of models of one kind of layer or of all.

Each run is compared with the planner's own prediction, and efficiencies and overheads are fitted by
least squares of the relative errors.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from scipy.optimize import least_squares

from calibration.measure import MATRIX, REPEATS, measure_collectives, measure_runs
from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import COLOCATED, Batch, Layout
from examples.mimo.common.layout_rules import CHUNKWISE
from examples.mimo.nemotron_vlm.loop.encoder_schedule import FASTEST
from examples.mimo.nemotron_vlm.model.presets import VLMPreset, find_preset, write_preset
from examples.mimo.nemotron_vlm.options.layout_rules import resolve
from examples.mimo.nemotron_vlm.planner.machine import Machine, find_machine, write_machine
from examples.mimo.nemotron_vlm.planner.plan import Plan, most_that_fit
from examples.mimo.nemotron_vlm.planner.step_time import step_time

LAYERS = 8
MOST = {"num_experts": 16, "vocab_size": 32768}
"""Upper limits with which a model fits one GPU; only the width of its layers matters."""
SEQ_LENGTH = 4096
"""Upper limit of the sequence length."""
SAMPLES = 4
"""Samples of the larger microbatches; the smaller ones have one."""
ON_GPU = (
    "--bf16 --num-workers 8 --moe-grouped-gemm --moe-router-fusion --moe-permute-fusion "
    "--use-fused-weighted-squared-relu --cross-entropy-loss-fusion --rerun-mode disabled"
)
"""Options of large runs, and processes that load data ahead."""
WORK_OF = {"*": "attention", "M": "scan", "G": "delta", "E": "experts"}
"""The kind of work that only one kind of layer has."""
HIGHEST = 0.8
"""Share of the peak that large matrix products reach; the upper limit of fitted efficiencies."""
DRAWN = 0.03
"""Weight of the regularization towards the initial figures: a figure that is e times its initial
value costs as much as an error of 3 % in one run."""


@dataclass(frozen=True)
class Case:
    """A run on one rank: sizes that replace the base model's, and samples of a step.

    encoder_layers: layers of the ViT. samples: samples of a step. micro: samples of a microbatch.
    macro_batch: microbatches whose images are encoded at once. The others are as in the presets.
    """

    hybrid_layer_pattern: str
    encoder_layers: int
    num_experts: int
    vocab_size: int
    seq_length: int
    samples: int
    micro: int
    macro_batch: int = 1

    def preset(self, base: VLMPreset) -> VLMPreset:
        """Return the base model with these sizes."""
        names = ("hybrid_layer_pattern", "num_experts", "vocab_size")
        language = replace(base.language, **{name: getattr(self, name) for name in names})
        encoder = replace(base.images, layers=self.encoder_layers)
        return replace(base, encoders=(encoder,), language=language, seq_length=self.seq_length)

    def plan(self, base: VLMPreset) -> Plan:
        """Return the case as a plan, for the planner's prediction."""
        preset, batch = self.preset(base), Batch(self.samples, self.micro, self.seq_length)
        layouts = resolve([Layout()], Layout(), batch, 1, preset, COLOCATED, CHUNKWISE)
        tiles = most_that_fit(preset, self.seq_length)
        return Plan(preset, layouts, tiles, macro_batch=self.macro_batch)

    def line(self, base: VLMPreset, device: str, model: Path) -> list[str]:
        """Write the model to a file, and return the program's command line."""
        write_preset(self.preset(base), model)
        line = f"--model {model} --device {device} --global-batch-size {self.samples} "
        line += f"--micro-batch-size {self.micro} --encoder-macro-batch {self.macro_batch} "
        return (line + ON_GPU * (device == "cuda")).split()


def calibrate(file: Path, model: str, device: str, gpu: str) -> None:
    """Measure this host, and write its figures with the measurements that they were fitted to.

    Args:
        file: file to write; if it exists, the runs that it has are not repeated.
        model: name or file of the model whose layers are measured.
        device: cpu or cuda.
        gpu: name of the GPU whose peaks a cuda device has, and with whose figures the fit begins.

    Raises:
        UserError: an argument is bad, or no run worked.
    """
    on_gpu, base = device == "cuda", find_preset(model)
    machine = find_machine(gpu) if on_gpu else _this_cpu()
    kept = json.loads(file.read_text()) if file.exists() else {}
    found = {Case(**run["case"]): run for run in kept.get("runs", [])}
    cases = [case for case in _cases(base, FASTEST if on_gpu else 1) if case not in found]
    with tempfile.TemporaryDirectory() as place:
        lines = [case.line(base, device, Path(place) / f"{n}.json") for n, case in enumerate(cases)]
        for case, ranks in zip(cases, measure_runs(lines, 1, on_gpu), strict=True):
            if ranks:
                found[case] = {"case": asdict(case)} | ranks[0]
    if not found:
        raise UserError(f"--device {device}: none of the runs that measure it worked")
    runs = list(found.values())
    collectives = kept.get("collectives") or measure_collectives(device)
    fit = fitted(machine, [case.plan(base) for case in found], runs)
    source = f"{machine.source.split(';')[0]}; {len(runs)} runs on one rank"
    fit = with_collectives(replace(fit, source=source), collectives)
    write_machine(fit, file, {"collectives": collectives, "runs": runs})


def _cases(base: VLMPreset, at_once: int) -> Iterator[Case]:
    """Yield cases of each kind of layer alone at two sizes, of the encoder, and of the whole model.

    at_once: microbatches whose images are encoded at once, if a step has that many.
    """
    p = base.language
    sizes = {name: min(most, getattr(p, name)) for name, most in MOST.items()}
    sizes["seq_length"] = min(SEQ_LENGTH, base.seq_length)
    pattern = p.hybrid_layer_pattern.replace("|", "")[:LAYERS]
    deep, thin = base.images.layers, max(1, base.images.layers // 16)

    def of(layers: str, encoder: int, samples: int, micro: int, **changed: int) -> Case:
        batch = {"samples": samples, "micro": micro, "macro_batch": min(at_once, samples // micro)}
        return Case(layers, encoder, **sizes | changed, **batch)

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


def fitted(machine: Machine, plans: list[Plan], runs: list[dict]) -> Machine:
    """Return the machine whose predictions have the smallest relative errors.

    Figures are drawn towards the given machine's, which decide what the runs leave open.

    Args:
        runs: measured ``seconds`` of a step of each plan.
    """
    kinds = sorted(
        set("".join(plan.preset.language.hybrid_layer_pattern for plan in plans)) - {"|"}
    )
    work = ["gemm", "vit", *(WORK_OF[kind] for kind in kinds if kind in WORK_OF)]
    figures = [("efficiency", kind) for kind in work]
    figures += [("overhead", kind) for kind in (*kinds, "expert", "vit", "head")]
    figures += [(name, "") for name in ("microbatch_overhead", "step_overhead")]
    figures += [("optimizer_bandwidth", "")]
    alone = replace(machine, shared_cores=0)
    seconds = np.array([run["seconds"] for run in runs])

    def scaled(logarithms: np.ndarray) -> Machine:
        changed = asdict(alone)
        for (group, kind), factor in zip(figures, np.exp(logarithms), strict=True):
            place, key = (changed[group], kind) if kind else (changed, group)
            place[key] = float(place[key] * factor)
        return Machine(**changed)

    def misses(logarithms: np.ndarray) -> np.ndarray:
        guess = scaled(logarithms)
        predicted = np.array([step_time(plan, guess).seconds for plan in plans])
        return np.append(predicted / seconds - 1, DRAWN * logarithms)

    # A figure may begin at the limit, from which the search has to keep away.
    highest = [
        max(np.log(HIGHEST / machine.efficiency[kind]), 1e-6) if group == "efficiency" else np.inf
        for group, kind in figures
    ]
    found = least_squares(misses, np.zeros(len(figures)), bounds=(-np.inf, highest))
    return replace(scaled(found.x), shared_cores=machine.shared_cores)


def with_collectives(machine: Machine, collectives: list[dict]) -> Machine:
    """Return the machine with the latency and bandwidth of timed collectives, if there are any."""
    if not collectives:
        return machine
    hops = collectives[0]["ranks"] - 1
    few, many = sorted({one["bytes"] for one in collectives})
    small, large = (
        mean(one["seconds"] for one in collectives if one["bytes"] == size) for size in (few, many)
    )
    latency = small / hops
    bandwidth = (many - few) * hops / (hops + 1) / max(large - small, 1e-9)
    links = dict.fromkeys(("node_bandwidth", "network_bandwidth"), bandwidth)
    links |= dict.fromkeys(("node_latency", "network_latency"), latency)
    return replace(machine, link_efficiency=1.0, **links)


def _this_cpu() -> Machine:
    """Return a machine of ranks on this host's cores: its measured peak, and usual figures."""
    torch.set_num_threads(1)
    matrix = torch.rand(MATRIX, MATRIX)
    matrix @ matrix
    begin = time.process_time()
    for _ in range(REPEATS):
        matrix @ matrix
    peak = REPEATS * 2 * MATRIX**3 / (time.process_time() - begin)
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
        efficiency=dict(gemm=0.4, attention=0.1, scan=0.01, delta=0.01, experts=0.3, vit=0.4),
        overhead=dict.fromkeys(["*", "M", "G", "E", "-", "vit", "head"], 2e-3) | {"expert": 5e-4},
        microbatch_overhead=0.01,
        step_overhead=0.01,
        optimizer_bandwidth=1e9,
        launches_ahead=False,
        fused=False,
        precision=4,
        shared_cores=cores,
    )
