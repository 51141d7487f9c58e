# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fit a machine's figures to runs on one rank, of models of one kind of layer or of all.

Each run is compared with the planner's own prediction, and efficiencies and overheads are fitted by
least squares of the relative errors.
"""

import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from calibration.measure import measure_collectives, measure_run
from calibration.validate import planned
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.presets import find_preset, write_preset
from examples.mimo.nemotron_vlm.planner.machine import Machine, find_machine
from examples.mimo.nemotron_vlm.planner.plan import Plan
from examples.mimo.nemotron_vlm.planner.step_time import step_time

MODEL, FITTED = "nano-vl-30b-a3b", Path(__file__).with_name("h200.json")
"""The model and the fit of docs/reviewer/planner.md, whose cases are what is measured elsewhere."""
ON_GPU = """--device cuda --bf16 --num-workers 8 --moe-grouped-gemm --moe-router-fusion
    --moe-permute-fusion --use-fused-weighted-squared-relu --cross-entropy-loss-fusion
    --rerun-mode disabled""".split()
"""Options of large runs, and processes that load data ahead."""
WORK_OF = {"*": "attention", "M": "scan", "G": "delta", "E": "experts"}
"""The kind of work that only one kind of layer has."""
HIGHEST = 0.8
"""Share of the peak that large matrix products reach; the upper limit of fitted efficiencies."""
DRAWN = 0.03
"""Weight of the regularization towards the initial figures: a figure that is e times its initial
value costs as much as an error of 3 % in one run."""


def line_of(case: dict, folder: Path) -> list[str]:
    """Return a case's command line of the program; write the model that has its encoder.

    Args:
        case: ``encoder_layers`` of the ViT, and ``arguments`` of the program. All other sizes are
            those of `MODEL`.
        folder: folder for the model's file.
    """
    layers, base = case["encoder_layers"], find_preset(MODEL)
    file = folder / f"{layers}.json"
    write_preset(replace(base, encoders=(replace(base.images, layers=layers),)), file)
    return ["--model", str(file), *case["arguments"].split()]


def calibrate(file: Path, gpu: str, environment: dict[str, str]) -> None:
    """Measure a GPU of this host, and write its figures and what they were fitted to.

    The cases are each kind of layer alone at several sizes, the encoder, and the whole model.

    Args:
        file: file to write.
        gpu: name of the GPU whose peaks it has, and with whose figures the fit begins.
        environment: environment of the runs.

    Raises:
        UserError: ``gpu`` is not known, or no run worked.
    """
    machine, plans, runs = find_machine(gpu), [], []
    if not file.absolute().parent.is_dir():
        raise UserError(f"{file}: no such folder")
    with tempfile.TemporaryDirectory() as folder:
        for known in json.loads(FITTED.read_text())["runs"]:
            line = line_of(known["case"], Path(folder))
            if figures := measure_run([*line, *ON_GPU], environment):
                print(f"{' '.join(line)}: {figures['seconds']:.4f} s", file=sys.stderr, flush=True)
                plans.append(planned(line, 1))
                runs.append({"case": known["case"]} | figures)
    if not runs:
        raise UserError("none of the runs that measure this host's GPU worked")
    collectives = measure_collectives(environment)
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
    """Return the machine with the latency and bandwidth of timed collectives, if there are any.

    They are those within a node; the network's, which one host cannot show, stay.
    """
    if not collectives:
        return machine
    few, many = collectives
    hops = few["ranks"] - 1
    more = max(many["seconds"] - few["seconds"], 1e-9)
    return replace(
        machine,
        link_efficiency=1.0,
        node_latency=few["seconds"] / hops,
        node_bandwidth=(many["bytes"] - few["bytes"]) * hops / few["ranks"] / more,
        network_bandwidth=machine.bandwidth(leaves_node=True),
    )
