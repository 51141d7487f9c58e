# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measure a machine: train models of one kind of layer for some steps, and fit its figures.

Each run on one rank is compared with the planner's own prediction, and efficiencies and overheads
are fitted by least squares of the relative errors. Collectives are timed between two GPUs, or
between CPU ranks. The file keeps the measurements beside the fit: a case that it has is not run
again.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from calibration.collectives import REPEATS, timed_collectives, with_collectives
from calibration.fit import USUAL, fitted
from calibration.measure import ROUNDS, busy_cores, measured, options_of
from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import COLOCATED, Batch, Layout
from examples.mimo.common.layout_rules import CHUNKWISE
from examples.mimo.nemotron_vlm.loop.encoder_schedule import FASTEST
from examples.mimo.nemotron_vlm.model.presets import VLMPreset, find_preset, write_preset
from examples.mimo.nemotron_vlm.options.layout_rules import resolve
from examples.mimo.nemotron_vlm.planner.machine import Machine, find_machine, write_machine
from examples.mimo.nemotron_vlm.planner.plan import Plan, most_that_fit
from examples.mimo.pretrain_nemotron_vlm import ALONE
from megatron.training.global_vars import unset_global_variables

LAYERS = 8
SMALLER = {"num_experts": 16, "vocab_size": 32768}
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
        language = replace(
            base.language,
            hybrid_layer_pattern=self.hybrid_layer_pattern,
            num_experts=self.num_experts,
            vocab_size=self.vocab_size,
        )
        encoder = replace(base.encoder, layers=self.encoder_layers)
        return replace(base, encoder=encoder, language=language, seq_length=self.seq_length)

    def plan(self, base: VLMPreset) -> Plan:
        """Return the case as a plan, for the planner's prediction."""
        preset, batch = self.preset(base), Batch(self.samples, self.micro, self.seq_length)
        layouts = resolve(Layout(), Layout(), batch, 1, preset, COLOCATED, CHUNKWISE)
        tiles = most_that_fit(preset, self.seq_length)
        return Plan(preset, layouts, tiles, macro_batch=self.macro_batch)


def calibrate(model: str, device: str, gpu: str, file: Path) -> None:
    """Measure this host, and write its figures with the measurements that they were fitted to.

    Args:
        model: name or file of the model whose layers are measured.
        device: cpu or cuda. gpu: name of the GPU in the table whose peaks a cuda device has.
        file: file to write after each run; if it exists, its measurements are kept.
    """
    os.environ.update(ALONE)
    base = find_preset(model)
    kept = json.loads(file.read_text()) if file.exists() else {}
    found = {Case(**run["case"]): [run] for run in kept.get("runs", [])}
    machine = replace(find_machine(gpu), **USUAL["cuda"]) if device == "cuda" else _of_this_cpu()
    if device == "cpu":
        from megatron.core import cpu_runtime

        cpu_runtime.install()
    with tempfile.TemporaryDirectory() as directory:
        lines = {
            case: _line(case, base, device, Path(directory) / f"{number}.json")
            for number, case in enumerate(_cases(base, FASTEST if device == "cuda" else 1))
            if case not in found
        }
        with busy_cores(list(lines.values())) if device == "cpu" else nullcontext():
            for case, line in (ROUNDS if device == "cpu" else 1) * list(lines.items()):
                if run := _run(case, line):
                    found.setdefault(case, []).append({"case": asdict(case)} | run)
                    file.write_text(json.dumps(kept | {"runs": _medians(found)}) + "\n")
    if not found:
        raise UserError(f"--device {device}: none of the runs that measure it worked")
    if dist.is_initialized():
        dist.destroy_process_group()
    if "collectives" not in kept:
        kept["collectives"] = timed_collectives(device)
    runs = _medians(found)
    fit = fitted(machine, [case.plan(base) for case in found], runs)
    source = f"{machine.source.split(';')[0]}; {len(runs)} runs on one rank"
    fit = replace(fit, source=source, shared_cores=machine.shared_cores)
    write_machine(with_collectives(fit, kept["collectives"]), file, kept | {"runs": runs})


def _medians(found: dict[Case, list[dict]]) -> list[dict]:
    """Return the run with the median time of each case."""
    return [sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2] for runs in found.values()]


def _cases(base: VLMPreset, at_once: int) -> Iterator[Case]:
    """Yield cases of each kind of layer alone at two sizes, of the encoder, and of the whole model.

    at_once: microbatches whose images are encoded at once, if a step has that many.
    """
    p = base.language
    sizes = {name: min(most, getattr(p, name)) for name, most in SMALLER.items()}
    sizes["seq_length"] = min(SEQ_LENGTH, base.seq_length)
    pattern = p.hybrid_layer_pattern.replace("|", "")[:LAYERS]
    deep, thin = base.encoder.layers, max(1, base.encoder.layers // 16)

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


def _line(case: Case, base: VLMPreset, device: str, model: Path) -> list[str]:
    """Write a case's model to a file, and return the program's command line."""
    write_preset(case.preset(base), model)
    line = f"--model {model} --device {device} --global-batch-size {case.samples} "
    line += f"--micro-batch-size {case.micro} --encoder-macro-batch {case.macro_batch} "
    line += ON_GPU if device == "cuda" else ""
    return line.split()


def _run(case: Case, line: list[str]) -> dict[str, float] | None:
    """Run a case; return seconds of a step and peak bytes, or print why it fails, and None."""
    name = " ".join(f"{key}={value}" for key, value in asdict(case).items())
    begin = time.perf_counter()
    try:
        found = measured(options_of(line, 1))
    except Exception as error:  # errors of any kind: the other cases still run
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
    """Return a machine of ranks on this host's cores, with measured peak and nothing fitted yet."""
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
