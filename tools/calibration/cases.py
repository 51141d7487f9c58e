# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that validation compares with their prediction, and their command lines."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

from calibration.measure import options_of
from examples.mimo.nemotron_vlm.planner.plan import Plan, Tiles, plan_of

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ON_CPU = [
    (1, "", "", 2, ""),
    (1, "", "", 4, FULL),
    (2, "dp=2", "dp=2,ep=2", 2, ""),
    (2, "tp=2", "tp=2,ep=2,etp=1", 4, ""),
    (2, "dp=2", "cp=2", 4, "--encoder-macro-batch 2"),
    (2, "dp=2", "pp=2", 2, ""),
    (2, "dp=1", "dp=1", 2, "--placement non-colocated"),
    (4, "dp=4", "dp=4", 2, ""),
    (4, "dp=4", "dp=4,ep=4", 2, ""),
    (4, "dp=4", "dp=4,ep=2", 1, ""),
    (4, "dp=4", "tp=2,pp=2", 2, ""),
    (4, "tp=4", "tp=4,ep=4,etp=1", 4, ""),
    (4, "tp=2,dp=2", "cp=2,dp=2,ep=2", 2, ""),
    (4, "dp=4", "pp=2,dp=2,vpp=2", 2, "--recompute-encoder 1"),
    (4, "dp=4", "pp=4", 2, ""),
    (4, "dp=4", "tp=2,dp=2,ep=4,etp=1", 4, ""),
    (4, "dp=2", "dp=2,ep=2", 2, "--placement non-colocated"),
]
ON_GPU = [
    (1, "", "", 1, ""),
    (1, "", "", 2, ""),
    (1, "", "", 4, ""),
    (1, "", "", 2, FULL),
    (1, "", "", 2, "--recompute-encoder 1"),
    (1, "", "", 1, "--encoder-macro-batch 4"),
    (1, "", "", 1, "--data digits:4"),
    (1, "", "", 2, "--data digits:4"),
    (1, "", "", 2, "--data digits:9"),
    (1, "", "", 2, "--hybrid-layer-pattern MM*MM*EE"),
    (1, "", "", 1, "--seq-length 32768 --global-batch-size 2"),
    (2, "dp=2", "dp=2", 2, ""),
    (2, "tp=2", "dp=2", 2, ""),
    (2, "dp=2", "tp=2,ep=2,etp=1", 2, ""),
    (2, "dp=2", "pp=2", 2, ""),
    (2, "dp=2", "cp=2", 2, ""),
]
"""Ranks, layouts of encoder and language model, samples of a microbatch, and other options."""
SMALL = Path(__file__).with_name("validation_model.json")
"""Model of the cases on CPU ranks; those on GPUs have the benchmark's."""
BENCHMARK = Path(__file__).parents[1] / "bench" / "vlm.toml"
SAMPLES = 8
"""Samples of a step on CPU ranks."""
DECIDE = [f"--{name}" for name in ("model", "num-layers", "hybrid-layer-pattern", "num-experts")]
DECIDE += [f"--{name}" for name in ("vocab-size", "seq-length", "global-batch-size")]
DECIDE += [f"--{name}" for name in ("micro-batch-size", "encoder", "language", "placement")]
DECIDE += ["--encoder-macro-batch", "--recompute-encoder", "--encoder-schedule"]
DECIDE += [f"--recompute-{name}" for name in ("granularity", "method", "num-layers")]
"""Options that change the prediction."""


def arguments_of(case: tuple, on_gpu: bool) -> list[str]:
    """Return the program's command line for a case."""
    _, encoder, language, micro, more = case
    base = f"--model {SMALL} --global-batch-size {SAMPLES}"
    if on_gpu:
        base = tomllib.loads(BENCHMARK.read_text())["device"]["cuda"]["arguments"]
    layouts = [*(["--encoder", encoder] if encoder else [])]
    layouts += ["--language", language] if language else []
    return [*base.split(), *layouts, "--micro-batch-size", str(micro), *more.split()]


def planned(words: list[str], ranks: int) -> Plan:
    """Return the plan of a command line, on any host; ``--data digits:N`` has N tiles a sample."""
    pairs = list(zip(words, words[1:], strict=False))
    asked = [word for pair in pairs if pair[0] in DECIDE for word in pair]
    plan = plan_of(options_of(asked, ranks))
    of_data = [value.partition(":")[2] for name, value in pairs if name == "--data"]
    if of_data and of_data[-1]:
        plan = replace(plan, images=Tiles(min(float(of_data[-1]), plan.images.mean)))
    return plan
