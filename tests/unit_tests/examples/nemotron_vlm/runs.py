# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Short training runs: in this process on all its ranks, and the one-rank run they must equal."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from examples.mimo.nemotron_vlm.cli import parse_args
from examples.mimo.nemotron_vlm.data import SampleSource, make_source
from examples.mimo.nemotron_vlm.layout import parse_layout
from examples.mimo.nemotron_vlm.presets import VLMPreset
from examples.mimo.nemotron_vlm.trainer import Trainer
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

DEVICE = ("--device", "cuda" if HAVE_CUDA else "cpu")

STEPS = 10

SHORT_RUN = (*DEVICE, "--steps", str(STEPS), "--lr", "1e-4", "--adam-eps", "1e-3")
"""Ten steps. The epsilon is of the gradients' size: with a small one Adam makes full steps of
rounding, until a token's choice between two equal experts falls otherwise, which is a jump."""

TOLERANCE = 1e-4
"""Relative, of fp32 losses and gradient norms: sums in another order, ten steps amplified."""


SAMPLES = 32
"""Samples of a global batch whose trajectory is compared."""

ONE_RANK_TIMEOUT_S = 200


@contextlib.contextmanager
def trainer(
    *arguments: str, source: SampleSource | None = None, preset: VLMPreset | None = None
) -> Iterator[Trainer]:
    """A trainer for command-line arguments on this world's ranks; its groups end with the block.

    Args:
        source: of other samples than the arguments say.
        preset: of another model; the arguments' one must allow the same layouts.
    """
    Utils.initialize_distributed()
    config = parse_args([*SHORT_RUN, *arguments], Utils.world_size)
    config = replace(config, preset=preset or config.preset)
    layouts = config.layouts
    source = source or make_source(
        config.data, config.preset.encoder, layouts.batch.seq_length, config.seed
    )
    run = Trainer(config, source)
    try:
        yield run
    finally:
        run.destroy()


def trajectory(*arguments: str, steps: int = STEPS) -> list[dict]:
    """The records of a run's first training steps on this world's ranks."""
    with trainer(*arguments) as run:
        return [run.train_step() for _ in range(steps)]


def one_rank_trajectory(*arguments: str) -> list[dict]:
    """The same run's records in a process of its own; run once for all worlds and tests."""
    directory = Path(os.environ.get("ONE_RANK_RUNS") or _shared_directory())
    digest = hashlib.sha256(repr(arguments).encode()).hexdigest()[:16]
    whole = directory / f"{digest}.jsonl"
    if Utils.rank == 0 and not whole.exists():
        partial = directory / digest / "metrics.jsonl"
        _run_alone([*SHORT_RUN, *arguments, "--metrics-out", str(partial)])
        partial.rename(whole)
    deadline = time.monotonic() + ONE_RANK_TIMEOUT_S
    while not whole.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no one-rank run after {ONE_RANK_TIMEOUT_S} s: {arguments}")
        time.sleep(0.2)
    return [json.loads(line) for line in whole.read_text().splitlines()]


@functools.cache
def _shared_directory() -> str:
    """A directory that all ranks of a world started by itself know of."""
    Utils.initialize_distributed()
    chosen = [tempfile.mkdtemp(prefix="one-rank-runs-")]
    dist.broadcast_object_list(chosen)
    return chosen[0]


def _run_alone(arguments: list[str]) -> None:
    import examples.mimo.nemotron_vlm as package

    script = Path(package.__path__[0]).parent / "pretrain_nemotron_vlm.py"
    result = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={k: v for k, v in os.environ.items() if not _is_launcher(k)},
        capture_output=True,
        text=True,
        timeout=ONE_RANK_TIMEOUT_S,
    )
    assert result.returncode == 0, result.stderr


def _is_launcher(name: str) -> bool:
    return name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith(
        ("MASTER_", "TORCHELASTIC_", "GROUP_", "LOCAL_WORLD", "ROLE_")
    )


def assert_same_trajectory(records: list[dict], reference: list[dict]) -> None:
    """Losses, gradient norms and token counts of every step agree."""
    for name in ("loss", "grad_norm"):
        expected = [record[name] for record in reference]
        assert [record[name] for record in records] == pytest.approx(expected, rel=TOLERANCE), name
    assert [r["num_tokens"] for r in records] == [r["num_tokens"] for r in reference]
    assert not any(r["skipped"] for r in records)


def assert_same_trajectory_as_one_rank(
    encoder: str,
    language: str,
    *options: str,
    common: tuple[str, ...] = (),
    microbatches: int = 2,
    samples: int = SAMPLES,
    steps: int = STEPS,
) -> None:
    """Train in the layouts, ``language`` with its dp, and on one rank.

    Args:
        options: command-line arguments of the run in the layouts, which do not matter on one rank.
        common: those of both runs.
        microbatches: of a step, each of which costs all its collectives; with a pipeline, as many
            as stages.
        samples: of the global batch.
        steps: that are compared, of the ten of a run.
    """
    layout = parse_layout(language, "language")

    def batch(microbatches: int, dp: int) -> tuple[str, ...]:
        micro_size = samples // microbatches // dp
        return ("--global-batch-size", str(samples), "--micro-batch-size", str(micro_size), *common)

    count = layout.pp if layout.pp > 1 else microbatches
    layouts = ("--encoder", encoder, "--language", language)
    records = trajectory(*layouts, *batch(count, layout.dp), *options, steps=steps)
    assert_same_trajectory(records, one_rank_trajectory(*batch(2, 1))[:steps])
