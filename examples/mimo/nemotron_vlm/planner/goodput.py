# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Training with failures: the share of the time that becomes steps which last.

Failures of GPUs are independent, so the run's come as a Poisson process. One loses the steps since
the last checkpoint and the time of a restart. A checkpoint stops training while it is written. In a
step in which a GPU is slow all others wait for it.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass, replace

CHECKPOINT_SECONDS = (5.0, 30.0, 120.0)
MTBF_FACTORS = (0.25, 1.0, 4.0)
"""Of the asked-for mean time between failures: what the table shows."""


@dataclass(frozen=True)
class Conditions:
    """Of a run, in seconds.

    Attributes:
        mtbf: mean time between failures of the whole run.
        checkpoint: that a checkpoint stops training. interval: training between two of them.
        restart: from a failure to the next step.
        straggler_chance: that a step has a slow GPU. straggler_slowdown: such a step over a usual
            one.
    """

    step: float
    mtbf: float
    checkpoint: float
    interval: float
    restart: float
    straggler_chance: float = 0.0
    straggler_slowdown: float = 1.0


def best_interval(checkpoint: float, mtbf: float) -> float:
    """Young's: sqrt(2 · checkpoint · MTBF), Communications of the ACM 17 (1974)."""
    return math.sqrt(2 * checkpoint * mtbf)


def goodput(run: Conditions) -> float:
    """Seconds of lasting steps at full speed, over all seconds, in the long run.

    Between two failures, 1/(exp(cycle/MTBF) - 1) whole cycles of steps and a checkpoint are
    expected: the k-th ends before the failure with a chance of exp(-k · cycle/MTBF).
    """
    mean_step = run.step * (1 + run.straggler_chance * (run.straggler_slowdown - 1))
    steps = max(1, round(run.interval / mean_step))
    cycle = steps * mean_step + run.checkpoint
    return steps * run.step / math.expm1(cycle / run.mtbf) / (run.mtbf + run.restart)


def table(run: Conditions) -> list[tuple[float, float, float, float]]:
    """MTBF and checkpoint seconds, the best interval there, and the goodput."""
    rows = []
    for factor in MTBF_FACTORS:
        for checkpoint in CHECKPOINT_SECONDS:
            mtbf = run.mtbf * factor
            interval = best_interval(checkpoint, mtbf)
            case = replace(run, mtbf=mtbf, checkpoint=checkpoint, interval=interval)
            rows.append((mtbf, checkpoint, interval, goodput(case)))
    return rows


def describe_goodput(options: Namespace) -> str:
    """The table of a command line."""
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
