# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fit of a machine's figures to measurements."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
from scipy.optimize import least_squares

from examples.mimo.nemotron_vlm.planner.machine import Machine
from examples.mimo.nemotron_vlm.planner.plan import Plan
from examples.mimo.nemotron_vlm.planner.step_time import step_time

WORK_OF = {"*": "attention", "M": "scan", "G": "delta", "E": "experts"}
"""The kind of work that only one kind of layer has."""
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
"""Figures with which the fit begins; those that the runs do not determine stay the same."""
HIGHEST = 0.8
"""Share of the peak that large matrix products reach; the upper limit of fitted efficiencies."""
DRAWN = 0.03
"""Weight of the regularization towards the initial figures: a run's error of 3 % costs as much as a
figure that is e times its initial value."""


def fitted(machine: Machine, plans: list[Plan], runs: list[dict]) -> Machine:
    """Return the machine whose predictions have the smallest relative errors.

    Figures are regularized towards the given machine's, which decide what the runs leave open.
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
