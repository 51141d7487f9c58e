# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Losses and gradient norms of runs: in this process on all its ranks, on one rank, and apart."""

import functools
import hashlib
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path

import pytest
import torch.distributed as dist

from examples.mimo.nemotron_vlm.data import SampleSource
from examples.mimo.nemotron_vlm.loop.run import train
from tests.unit_tests.examples.nemotron_vlm import preloaded
from tests.unit_tests.examples.nemotron_vlm.loop.models import MODELS, Model
from tests.unit_tests.examples.nemotron_vlm.loop.rows import Row
from tests.unit_tests.examples.nemotron_vlm.runs import (
    SHORT_RUN,
    STEPS,
    from_last_rank,
    options_of,
    session_of,
)
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

FIGURES = ("loss", "grad_norm")
EVALUATED = ("eval_loss", "eval_accuracy", "eval_exact_match")

MOST = 1e-2
"""The largest tolerance of a 16-bit run on GPUs, relative."""

MICROBATCHES = (2, 1, 4)
"""Microbatches per step of the one-GPU runs whose spread bounds 16-bit runs; the first is the
reference."""

ONE_RANK_S = 600
"""Seconds that a run on one rank may take."""


def trajectory(
    *arguments: str, steps: int = STEPS, source: SampleSource | None = None
) -> list[dict]:
    """The records of a run's first steps on this world's ranks, through Megatron's whole loop.

    Args:
        source: gives samples in place of those that the arguments name.
    """
    Utils.initialize_distributed()
    with session_of(options_of(*_first(steps), *arguments), source) as session:
        records: list[dict] = []
        train(session, records.append)
        return from_last_rank(records)


def _first(steps: int) -> tuple[str, ...]:
    """Arguments of a run that ends after its first steps."""
    return ("--train-iters", str(steps), "--lr-decay-iters", str(STEPS)) if steps < STEPS else ()


def one_rank_trajectory(
    *arguments: str, steps: int = STEPS, source: SampleSource | None = None
) -> list[dict]:
    """The same run's records on one rank; run once for all worlds and tests.

    A world of one GPU runs it itself, any other world in a process of its own.
    """
    arguments = (*_first(steps), *arguments)
    directory = Path(os.environ.get("ONE_RANK_RUNS") or _shared_directory())
    digest = hashlib.sha256(repr((arguments, type(source))).encode()).hexdigest()[:16]
    whole = directory / f"{digest}.jsonl"
    if Utils.rank == 0 and not whole.exists():
        # Another world may want it at the same time.
        partial = directory / f"{digest}-{os.getpid()}" / "metrics.jsonl"
        partial.parent.mkdir()
        arguments = (*arguments, "--metrics-out", str(partial))
        if HAVE_CUDA and Utils.world_size == 1:
            trajectory(*arguments, source=source)
        else:
            _run_alone([*SHORT_RUN, *arguments], partial.with_name("said"), source)
        partial.replace(whole)
    while not whole.exists():  # the limit on tests without progress ends a wait for ever
        time.sleep(0.2)
    return [json.loads(line) for line in whole.read_text().splitlines()]


@functools.cache
def _shared_directory() -> str:
    """A directory that all ranks of a world started by itself know of."""
    Utils.initialize_distributed()
    chosen = [tempfile.mkdtemp(prefix="one-rank-runs-")]
    dist.broadcast_object_list(chosen)
    return chosen[0]


def _run_alone(arguments: list[str], log: Path, source: SampleSource | None) -> None:
    """Run the program in a forked process, because the imports take ten seconds.

    With GPUs the imports start CUDA, which does not outlast a fork, so the process is a new one.
    """
    context = multiprocessing.get_context("spawn" if HAVE_CUDA else "forkserver")
    if not HAVE_CUDA:
        context.set_forkserver_preload([preloaded.__name__])
    process = context.Process(target=_program, args=(arguments, log, source))
    process.start()
    process.join(ONE_RANK_S)
    process.kill()
    process.join()
    assert process.exitcode == 0, log.read_text()


def _program(arguments: list[str], log: Path, source: SampleSource | None) -> None:
    from examples.mimo.nemotron_vlm.loop import run
    from examples.mimo.pretrain_nemotron_vlm import main

    if source:
        run.make_source = lambda args, preset: source
    for name in filter(is_of_this_process, list(os.environ)):
        del os.environ[name]
    with log.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
        sys.exit(main(arguments))


def is_of_this_process(name: str) -> bool:
    """Whether the launcher, or a model that was built here, has set the variable."""
    return name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith(
        ("MASTER_", "TORCHELASTIC_", "GROUP_", "LOCAL_WORLD", "ROLE_", "NVTE_")
    )


def differences(records: list[dict], reference: list[dict]) -> list[dict[str, float]]:
    """Return the relative differences of losses and gradient norms in each step that is not
    skipped: gradients of a skipped one are not finite.
    """
    pairs = [
        (one, other)
        for one, other in zip(records, reference, strict=True)
        if not (one["skipped"] or other["skipped"])
    ]
    return [{name: abs(one[name] / other[name] - 1) for name in FIGURES} for one, other in pairs]


def apart(records: list[dict], reference: list[dict]) -> dict[str, float]:
    """Return the largest relative differences of losses and gradient norms in any step."""
    steps = differences(records, reference)
    return {name: max(step[name] for step in steps) for name in FIGURES}


def _run(row: Row, shards: Path | None, steps: int, saved: Path | None) -> list[dict]:
    """Run a row on this world's ranks, from a checkpoint to the next if it has several layouts."""
    source, records = MODELS[row.model].source, []
    places = ("--save", str(saved)) if row.then else ()
    for number, command in enumerate(row.commands, 1):
        line = [option.format(shards=shards) for option in command]
        last = steps * number // len(row.layouts)
        records += trajectory(*line, *places, steps=last, source=source)
        places = ("--save", str(saved), "--load", str(saved))
    return records


def reference_of(
    model: Model,
    arguments: Iterable[str],
    steps: int = STEPS,
    microbatches: int = MICROBATCHES[0],
) -> list[dict]:
    """Return the records of a model's run on one rank, which others are compared with."""
    batch = model.batch(microbatches, 1)
    return one_rank_trajectory(*arguments, *batch, steps=steps, source=model.source)


def tolerance(model: Model) -> dict[str, float]:
    """Return the tolerance of each figure: the model's own, or on GPUs twice the largest difference
    of a step between any two of three one-GPU runs, at most 1 %.

    The forward of these runs rounds alike, so that they part by single tokens' experts; layouts
    also round partial sums.
    """
    if model.tolerance is not None:
        return dict.fromkeys(FIGURES[:1] if model.is_16_bit else FIGURES, model.tolerance)
    if model.packed:  # a microbatch is one row: images of several are encoded at once instead
        others = [(*model.batch(1, 1), "--encoder-macro-batch", str(count)) for count in (1, 4)]
    else:
        others = [model.batch(count, 1) for count in MICROBATCHES[1:]]
    runs = [one_rank_trajectory(*model.options, *other, source=model.source) for other in others]
    pairs = combinations([reference_of(model, model.options), *runs], 2)
    steps = [step for one, other in pairs for step in differences(one, other)]
    return {name: min(2 * max(step[name] for step in steps), MOST) for name in FIGURES}


def steps_of(row: Row) -> int:
    """Return the number of steps of a row; each layout takes two at least."""
    return max(MODELS[row.model].steps, 2 * len(row.layouts) if row.then else 0)


def compare(row: Row, shards: Path | None = None, saved: Path | None = None) -> dict[str, object]:
    """Run a row on this world's ranks, and compare it with the run on one rank.

    Args:
        shards: a data set, for models that read it. saved: holds checkpoints of a row that goes on.
    """
    model = MODELS[row.model]
    arguments = [option.format(shards=shards) for option in model.options]
    count = MICROBATCHES[0]
    if model.tolerance == 0:
        count = math.prod(row.microbatches_and_dp(row.language))
    reference = reference_of(model, (*arguments, *row.common), steps_of(row), count)
    return judged(model, _run(row, shards, steps_of(row), saved), reference)


def judged(model: Model, records: list[dict], reference: list[dict]) -> dict[str, object]:
    """Compare a run of a model with another in which it is the same.

    Found is the largest difference of a step; of a 16-bit run on GPUs the root mean square over the
    steps.

    Returns:
        Found and allowed differences by name of the figure; `skipped` counts skipped steps.
    """
    for name in ("step", "num_tokens", "skipped"):
        assert [r[name] for r in records] == [r[name] for r in reference], name
    of_evaluations, expected = (
        [record[name] for record in run for name in EVALUATED if name in record]
        for run in (records, reference)
    )
    rel = MOST if model.tolerance is None else model.tolerance
    assert of_evaluations == pytest.approx(expected, rel=rel)
    allowed, found = tolerance(model), apart(records, reference)
    if model.tolerance is None:
        parts = differences(records, reference)
        found = {n: math.hypot(*(s[n] for s in parts)) / len(parts) ** 0.5 for n in FIGURES}
    skipped = sum(record["skipped"] for record in records)
    return {"found": found, "allowed": allowed, "skipped": skipped}


def check(
    row: Row,
    record_property,
    shards: Path | None = None,
    saved: Path | None = None,
    compare: Callable[..., dict] = compare,
) -> None:
    """Compare a row with one rank, note the figures, and assert that they are within tolerance."""
    result = compare(row, shards, saved)
    for name, value in result.items():
        record_property(name, value)
    for name, allowed in result["allowed"].items():
        assert result["found"][name] <= allowed, f"{name}: {result}"
    assert (result["skipped"] > 0) == (row.model == "fp16")
