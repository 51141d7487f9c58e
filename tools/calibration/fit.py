# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fit a machine's figures to runs on one rank, of models of one kind of layer or of all.

Each run is compared with the planner's own prediction, and efficiencies and overheads are fitted by
least squares of the relative errors.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from calibration.measure import measure_collectives, measure_runs
from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import COLOCATED, Batch, Layout
from examples.mimo.common.layout_rules import CHUNKWISE
from examples.mimo.nemotron_vlm.model.presets import VLMPreset, find_preset, write_preset
from examples.mimo.nemotron_vlm.options.layout_rules import resolve
from examples.mimo.nemotron_vlm.planner.inputs import most_that_fit
from examples.mimo.nemotron_vlm.planner.machine import Machine, find_machine
from examples.mimo.nemotron_vlm.planner.plan import Plan
from examples.mimo.nemotron_vlm.planner.step_time import step_time
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule

MODEL, FITTED = "nano-vl-30b-a3b", Path(__file__).with_name("h200.json")
"""The model and the fit of docs/reviewer/planner.md, whose cases are what is measured elsewhere."""
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
        inputs = most_that_fit(preset, self.seq_length)
        return Plan(preset, layouts, inputs, schedule=EncoderSchedule(self.macro_batch))

    def line(self, base: VLMPreset, model: Path) -> list[str]:
        """Write the model to a file, and return the program's command line."""
        write_preset(self.preset(base), model)
        line = f"--model {model} --device cuda --global-batch-size {self.samples} "
        line += f"--micro-batch-size {self.micro} --encoder-macro-batch {self.macro_batch} "
        return (line + ON_GPU).split()


def calibrate(file: Path, gpu: str) -> None:
    """Measure a GPU of this host, and write its figures and what they were fitted to.

    The cases are each kind of layer alone at several sizes, the encoder, and the whole model.

    Args:
        file: file to write.
        gpu: name of the GPU whose peaks it has, and with whose figures the fit begins.

    Raises:
        UserError: ``gpu`` is not known, or no run worked.
    """
    machine, base, plans, runs = find_machine(gpu), find_preset(MODEL), [], []
    cases = [Case(**run["case"]) for run in json.loads(FITTED.read_text())["runs"]]
    with tempfile.TemporaryDirectory() as place:
        lines = [case.line(base, Path(place) / f"{n}.json") for n, case in enumerate(cases)]
        for case, figures in zip(cases, measure_runs(lines), strict=True):
            if figures:
                plans.append(case.plan(base))
                runs.append({"case": asdict(case)} | figures)
    if not runs:
        raise UserError("none of the runs that measure this host's GPU worked")
    collectives = measure_collectives()
    source = f"{machine.source.split(';')[0]}; {len(runs)} runs on one rank"
    fit = with_collectives(replace(fitted(machine, plans, runs), source=source), collectives)
    found = {"collectives": collectives, "runs": runs, "machine": asdict(fit)}
    file.write_text(json.dumps(found, indent=1) + "\n")


def fitted(machine: Machine, plans: list[Plan], runs: list[dict]) -> Machine:
    """Return the machine whose predictions have the smallest relative errors.

    Figures are drawn towards the given machine's, which decide what the runs leave open.

    Args:
        runs: measured ``seconds`` of a step of each plan.
    """
    kinds = sorted(set("".join(plan.preset.language.hybrid_layer_pattern for plan in plans)))
    work = ["gemm", "vit", *(WORK_OF[kind] for kind in kinds if kind in WORK_OF)]
    figures = [("efficiency", kind) for kind in work]
    figures += [("overhead", kind) for kind in (*kinds, "expert", "vit", "head")]
    alone = ("microbatch_overhead", "step_overhead", "optimizer_bandwidth")
    seconds = np.array([run["seconds"] for run in runs])

    def scaled(logarithms: np.ndarray) -> Machine:
        factors = np.exp(logarithms).tolist()
        changed = asdict(machine)
        for (group, kind), factor in zip(figures, factors, strict=False):
            changed[group][kind] *= factor
        for name, factor in zip(alone, factors[len(figures) :], strict=True):
            changed[name] *= factor
        return Machine(**changed)

    def misses(logarithms: np.ndarray) -> np.ndarray:
        guess = scaled(logarithms)
        predicted = np.array([step_time(plan, guess).seconds for plan in plans])
        return np.append(predicted / seconds - 1, DRAWN * logarithms)

    # A figure may begin at the limit, from which the search has to keep away.
    highest = [max(np.log(HIGHEST / machine.efficiency[kind]), 1e-6) for kind in work]
    highest += [np.inf] * (len(figures) + len(alone) - len(work))
    found = least_squares(misses, np.zeros(len(highest)), bounds=(-np.inf, highest))
    return scaled(found.x)


def with_collectives(machine: Machine, collectives: list[dict]) -> Machine:
    """Return the machine with the latency and bandwidth of timed collectives, if there are any."""
    if not collectives:
        return machine
    few, many = collectives
    hops = few["ranks"] - 1
    latency = few["seconds"] / hops
    more = max(many["seconds"] - few["seconds"], 1e-9)
    bandwidth = (many["bytes"] - few["bytes"]) * hops / few["ranks"] / more
    links = dict.fromkeys(("node_bandwidth", "network_bandwidth"), bandwidth)
    links |= dict.fromkeys(("node_latency", "network_latency"), latency)
    return replace(machine, link_efficiency=1.0, **links)
