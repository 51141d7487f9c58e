# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Time the colocated schedules: three phases, the encoder in bubbles, and the usual alternative.

Three phases are compared with T = E + L(1 + (p-1)/m); bubbles with three phases, beside the time
that their plan predicts and the bound L + max(E, L(p-1)/m). The alternative encodes each microbatch
on the first stage's ranks, inside the pipeline. E is the encoder's forward and backward over a
rank's samples, and L a stage's over all microbatches, each measured alone in the same run. The
schedules take turns, step by step; ratios of two are medians over the turns. No gradients are
reduced, and the optimizer does not run.

Usage, under torchrun with the checkout on PYTHONPATH, on GPUs:
    torchrun --nproc-per-node 4 tools/bench/colocated_pipeline.py pp=4 pp=2 --timeline out.png
On CPU ranks the model is tiny, and the ratios say little. There, --sleep MS --share S makes each
operation sleep until a set time has passed: MS for a stage's forward of a microbatch, twice that
for its backward, and for the encoder as long as gives it the share S of the work. Sleeping ranks
need no cores, so their waits for each other are real; MS must be longer than an operation computes
when ranks share cores. The alternative is then left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

from examples.mimo.nemotron_vlm.options.environment import at_start

os.environ.update(at_start(["--encoder-schedule", "bubbles"]))

import torch.distributed as dist
from ranks import start, take_turns
from timeline import CUDA, Span, draw

if not CUDA:
    from megatron.core import cpu_runtime

    cpu_runtime.install()

from colocated_schedules import Bench

from megatron.core.models.mimo.schedule.bubble_plan import Costs, bubble_plan

ROUNDS, TURNS = 3, 10


def seconds(runs: list[Callable[[], None]], bench: Bench, turns: int) -> list[list[float]]:
    """Return each run's seconds in every turn."""

    def of(run: Callable[[], None]) -> Callable[[], None]:
        def step() -> None:
            bench.model.zero_grad(set_to_none=True)
            run()

        return step

    return take_turns([of(run) for run in runs], bench.device, turns)


def ratio(times: list[float], others: list[float]) -> float:
    """Return the median over the turns of the ratio of two runs' times."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def measure(bench: Bench, language: str) -> tuple[dict[str, list[list[Span]]], float]:
    """Print a layout's row of the table.

    Returns:
        Each schedule's spans, by rank, and the bound in seconds.
    """
    e, length = map(min, seconds([bench.encoder_alone, bench.stage_alone], bench, ROUNDS))
    stages, number = bench.layouts.language.pp, bench.microbatches
    wait = length * (stages - 1) / number
    model, bound = e + length + wait, length + max(e, wait)
    share = e / (e + length)
    runs = {"three phases": bench.three_phases}
    if not bench.sleep_s:
        runs["encoder in the first stage"] = bench.encoder_in_first_stage
    if bench.layouts.language.cp == 1:
        runs["encoder in the bubbles"] = partial(bench.bubbles, share)
    times = dict(zip(runs, seconds(list(runs.values()), bench, TURNS), strict=True))
    step = times.pop("three phases")
    ratios = [
        f"{ratio(times[name], step):.3f}" if name in times else "–"
        for name in ("encoder in the first stage", "encoder in the bubbles")
    ]
    # The plan's unit is a stage's forward of a microbatch.
    plan = bubble_plan(stages, number, 1, costs=Costs.of_share(share))
    planned = plan.seconds * length / (3 * number)
    if dist.get_rank() == 0:
        print(
            f"| {language} | {number} | {1e3 * e:.1f} | {1e3 * length:.1f} "
            f"| {1e3 * statistics.median(step):.1f} | {statistics.median(step) / model:.3f} "
            f"| {' | '.join(ratios)} | {planned / model:.3f} | {bound / model:.3f} |",
            flush=True,
        )
    spans = {f"{language}: {name}": bench.spans(run) for name, run in runs.items()}
    return spans, bound


def main() -> None:
    """Print the table of all layouts, and draw the last one's timeline."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("layouts", nargs="*", default=["pp=2"], help="of the language model")
    parser.add_argument("--timeline", type=Path, metavar="PNG")
    parser.add_argument("--tiles", type=int, default=4 if CUDA else 2, help="of a sample")
    parser.add_argument("--samples", type=int, default=2, help="of a microbatch")
    parser.add_argument("--microbatches-a-stage", type=int, default=2, metavar="M")
    parser.add_argument("--sleep", type=float, default=0.0, metavar="MS", help="a stage's forward")
    parser.add_argument("--share", type=float, default=0.5, help="the encoder's, where ranks sleep")
    args = parser.parse_args()
    device = start()
    if dist.get_rank() == 0:
        print(
            "| language | microbatches | E, ms | L, ms | step, ms | step / T | "
            "encoder in first stage / step | in bubbles / step | planned / T | bound / T |\n"
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
        )
    for language in args.layouts:
        bench = Bench(language, device, args)
        with bench.watched():
            rows, bound = measure(bench, language)
        bench.destroy()
    if args.timeline and dist.get_rank() == 0:
        draw(args.timeline, rows, bound=bound)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
