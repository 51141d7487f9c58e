# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Goodput of training with failures: the share of time spent on steps that are not lost.

GPUs fail independently, so the failures of a run are a Poisson process. A failure costs the steps
since the last checkpoint and the time of a restart. Training stops while a checkpoint is written.
In a step with a slow GPU, all others wait for it.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass, replace

CHECKPOINT_SECONDS = (5.0, 30.0, 120.0)
MTBF_FACTORS = (0.25, 1.0, 4.0)
"""Factors of the given mean time between failures for which the table has rows."""


@dataclass(frozen=True)
class Conditions:
    """Conditions of a run; all times are in seconds.

    Attributes:
        step: one step without a slow GPU.
        mtbf: mean time between failures of the whole run.
        checkpoint: pause of training for a checkpoint. interval: training between two checkpoints.
        restart: time from a failure to the next step.
        straggler_chance: probability that a step has a slow GPU. straggler_slowdown: time of such a
            step over that of another.
    """

    step: float
    mtbf: float
    checkpoint: float
    interval: float
    restart: float
    straggler_chance: float = 0.0
    straggler_slowdown: float = 1.0


def best_interval(checkpoint: float, mtbf: float) -> float:
    """Return Young's interval, sqrt(2 · checkpoint · MTBF), Communications of the ACM 17 (1974)."""
    return math.sqrt(2 * checkpoint * mtbf)


def goodput(run: Conditions) -> float:
    """Return the long-run share of time that lasting steps would take at full speed.

    A cycle is the steps between checkpoints and one checkpoint. Between two failures,
    1/(exp(cycle/MTBF) - 1) whole cycles are expected, because the k-th ends before the failure with
    probability exp(-k · cycle/MTBF).
    """
    mean_step = run.step * (1 + run.straggler_chance * (run.straggler_slowdown - 1))
    steps = max(1, round(run.interval / mean_step))
    cycle = steps * mean_step + run.checkpoint
    return steps * run.step / math.expm1(cycle / run.mtbf) / (run.mtbf + run.restart)


def table(run: Conditions) -> list[tuple[float, float, float, float]]:
    """Return rows of MTBF and checkpoint in seconds, the best interval, and the goodput."""
    rows = []
    for factor in MTBF_FACTORS:
        for checkpoint in CHECKPOINT_SECONDS:
            mtbf = run.mtbf * factor
            interval = best_interval(checkpoint, mtbf)
            case = replace(run, mtbf=mtbf, checkpoint=checkpoint, interval=interval)
            rows.append((mtbf, checkpoint, interval, goodput(case)))
    return rows


def describe_goodput(options: Namespace) -> str:
    """Return the table for a command line's options, as text."""
    run = Conditions(
        step=options.step_seconds,
        mtbf=options.gpu_mtbf_hours * 3600 / options.gpus,
        checkpoint=0.0,
        interval=0.0,
        restart=60 * options.restart_minutes,
        straggler_chance=options.straggler_chance,
        straggler_slowdown=options.straggler_slowdown,
    )
    lines = ["failures every   checkpoint takes   one every   goodput"]
    for mtbf, checkpoint, interval, share in table(run):
        lines.append(
            f"{mtbf / 3600:12.1f} h {checkpoint:16.0f} s {interval / 60:7.1f} min {share:9.1%}"
        )
    return "\n".join(lines)
