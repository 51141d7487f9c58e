# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Short training runs: in this process on all its ranks, and the one-rank run they must equal."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from examples.mimo.common.layout import parse_layout
from examples.mimo.nemotron_vlm.data import SampleSource, make_source
from examples.mimo.nemotron_vlm.loop.checkpoint_loading import safe_loading
from examples.mimo.nemotron_vlm.loop.forward_step import ACCURACY, LOSS, TOKENS, forward_step
from examples.mimo.nemotron_vlm.loop.run import Session, close_session, open_session
from examples.mimo.nemotron_vlm.loop.run import train as train_session
from examples.mimo.nemotron_vlm.model.presets import PRESETS, VLMPreset
from examples.mimo.nemotron_vlm.options.arguments import Options, parse
from examples.mimo.nemotron_vlm.options.defaults import TRAINING
from megatron.core.enums import ModelType
from megatron.core.models.mimo.setup.module_groups import schedule_collection
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_model_config
from megatron.training import argument_utils, get_timers
from megatron.training import training as loop
from megatron.training.initialize import initialize_megatron
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

_read = argument_utils.ArgumentGroupFactory._get_field_docstrings
_texts: dict[type, dict[str, str]] = {}


def _read_once(factory: argument_utils.ArgumentGroupFactory, config: type) -> dict[str, str]:
    if config not in _texts:
        _texts[config] = _read(factory, config)
    return _texts[config]


# Megatron's parser parses the sources of its configurations for their help, a second each time.
argument_utils.ArgumentGroupFactory._get_field_docstrings = _read_once

LOCAL = ("--transformer-impl", "local")
"""Megatron's own layers: in fp32, Transformer Engine's attention has neither packed rows nor CP."""

DEVICE = ("--device", "cuda", *LOCAL) if HAVE_CUDA else ("--device", "cpu")
"""Device and layers; tests/gpu has the layers of Transformer Engine."""

STEPS = 10

COMPARED = 3
"""Number of steps compared by default: a wrong forward shows in the first, a wrong gradient in the
second, state that steps leave behind in the third. test_layout_invariance.py compares all ten."""

SHORT_RUN = (*DEVICE, "--train-iters", str(STEPS), "--lr", "1e-4", "--adam-eps", "1e-3")
"""Options of ten steps. The epsilon is as large as the gradients: with a small one Adam makes full
steps of rounding, until a token takes the other of two equal experts, which is a jump."""

OWN_DEFAULTS = ("--lr", str(TRAINING["lr"]), "--adam-eps", str(TRAINING["adam_eps"]))
"""The program's own defaults."""

TOLERANCE = 1e-4
"""Relative tolerance of fp32 losses and gradient norms: ten steps amplify sums in another order."""


SAMPLES = 32
"""Samples of a global batch whose trajectory is compared."""

ONE_RANK_TIMEOUT_S = 200


def options_of(*arguments: str, preset: VLMPreset | None = None) -> Options:
    """Parse a command line as the program does, on this world's ranks.

    Args:
        preset: sizes of a model in place of the one that the arguments name.
    """
    chosen = ()
    if preset:
        PRESETS[preset.name] = lambda: preset
        chosen = ("--model", preset.name)
    return parse([*SHORT_RUN, *arguments, *chosen], Utils.world_size)


@contextlib.contextmanager
def session_of(options: Options, source: SampleSource | None = None) -> Iterator[Session]:
    """The program with its groups made; all it made ends with the block."""
    args = options.args
    source = source or make_source(args, options.preset.encoder)
    groups_before = set(dist.distributed_c10d._world.pg_map)
    session = open_session(options, source)
    try:
        yield session
    finally:
        close_session(session)
    assert set(dist.distributed_c10d._world.pg_map) == groups_before


class Run:
    """Megatron's loop, taken step by step.

    Args:
        session: the program with its groups made.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.loading = session, session.loading
        self.args = session.options.args
        initialize_megatron(skip_model_parallel_init=True, skip_random_seed=True)
        self.collection = schedule_collection(session.modules)
        with safe_loading(self.args):
            self.stages, self.optimizer, self.scheduler = loop.setup_model_and_optimizer(
                ModelType.encoder_or_decoder,
                cfg_container=session.cfg,
                pg_collection=self.collection,
            )
        self.config = get_model_config(self.stages[0])
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.step = self.args.iteration
        self._batches = None
        for stage in self.stages:
            stage.train()

    @property
    def source(self) -> SampleSource:
        """The source of samples; set it before the first step, or before an evaluation."""
        return self.loading.reader.source

    @source.setter
    def source(self, source: SampleSource) -> None:
        self.loading.reader = dataclasses.replace(self.loading.reader, source=source)

    def train_step(self) -> dict:
        """Take one step of the loop; return its record on every rank."""
        if self._batches is None:
            self._batches = RerunDataIterator(self.loading.training())
        reported, skipped, _, _, _, grad_norm, _, _ = loop.train_step(
            forward_step,
            self._batches,
            self.stages,
            self.optimizer,
            self.scheduler,
            self.config,
            get_forward_backward_func(schedule_pg_collection=self.collection),
            iteration=self.step,
            pg_collection=self.collection,
            p2p_communicator=self.session.communicator,
        )
        self.step += 1
        self.args.consumed_train_samples += self.args.global_batch_size
        record = {
            "step": self.step,
            "loss": float(reported.get(LOSS, 0.0)),
            "grad_norm": grad_norm,
            "num_tokens": round(float(reported.get(TOKENS, 0.0))),
            "skipped": bool(skipped),
        }
        return from_last_rank(record)

    def forward_backward(self) -> None:
        """Compute the gradients of the next step's batch, and step no optimizer."""
        self.optimizer.step = lambda: (True, 0.0, 0)
        self.train_step()

    def evaluate(self, batches: int) -> float:
        """Return the accuracy on that many held-out batches."""
        self.args.eval_iters = batches
        read, _, _ = loop.evaluate(
            functools.partial(forward_step, score=self.source.score),
            RerunDataIterator(self.loading.held_out()),
            self.stages,
            None,
            self.config,
            pg_collection=self.collection,
            p2p_communicator=self.session.communicator,
        )
        return float(read[ACCURACY])

    def save(self, directory: Path) -> None:
        """Save as the loop does."""
        self.args.save = str(directory)
        get_timers()("interval-time", log_level=0).start()
        loop.save_checkpoint_and_time(self.step, self.stages, self.optimizer, self.scheduler, 0, {})
        get_timers()("interval-time").stop()


def from_last_rank(value):
    """Return the last rank's value on every rank, because only that rank has the losses."""
    chosen = [value]
    dist.broadcast_object_list(chosen, Utils.world_size - 1)
    return chosen[0]


@contextlib.contextmanager
def trainer(
    *arguments: str, source: SampleSource | None = None, preset: VLMPreset | None = None
) -> Iterator[Run]:
    """A run of command-line arguments on this world's ranks, to be taken step by step.

    Args:
        source: gives samples in place of those that the arguments name.
        preset: sizes of another model.
    """
    Utils.initialize_distributed()
    with session_of(options_of(*arguments, preset=preset), source) as session:
        run = Run(session)
        try:
            yield run
        finally:
            run.__dict__.clear()  # the model, which the session frees


def trajectory(
    *arguments: str,
    steps: int = STEPS,
    source: SampleSource | None = None,
    preset: VLMPreset | None = None,
) -> list[dict]:
    """The records of a run's first steps on this world's ranks, through Megatron's whole loop.

    Args:
        steps, source, preset: see `assert_same_trajectory_as_one_rank`.
    """
    Utils.initialize_distributed()
    options = options_of(*_first(steps), *arguments, preset=preset)
    with session_of(options, source) as session:
        records: list[dict] = []
        train_session(session, records.append)
        return from_last_rank(records)


def _first(steps: int) -> tuple[str, ...]:
    """Arguments of a run that ends after its first steps."""
    return ("--train-iters", str(steps), "--lr-decay-iters", str(STEPS)) if steps < STEPS else ()


def one_rank_trajectory(
    *arguments: str,
    steps: int = STEPS,
    source: SampleSource | None = None,
    preset: VLMPreset | None = None,
) -> list[dict]:
    """The same run's records on one rank; run once for all worlds and tests.

    A world of one GPU runs it itself, any other world in a process of its own.
    """
    arguments = (*_first(steps), *arguments, *(("--model", preset.name) if preset else ()))
    directory = Path(os.environ.get("ONE_RANK_RUNS") or _shared_directory())
    digest = hashlib.sha256(repr((arguments, type(source), preset)).encode()).hexdigest()[:16]
    whole = directory / f"{digest}.jsonl"
    if HAVE_CUDA and Utils.world_size == 1 and not whole.exists():
        records = trajectory(*arguments, source=source, preset=preset)
        partial = directory / f"{digest}-{os.getpid()}.jsonl"
        partial.write_text("".join(json.dumps(record) + "\n" for record in records))
        partial.replace(whole)
    elif Utils.rank == 0 and not whole.exists():
        # Another world may want it at the same time.
        partial = directory / f"{digest}-{os.getpid()}" / "metrics.jsonl"
        command = [*SHORT_RUN, *arguments, "--metrics-out", str(partial)]
        _run_alone(command, directory / f"{partial.parent.name}.log", source, preset)
        partial.replace(whole)
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


def _run_alone(
    arguments: list[str], log: Path, source: SampleSource | None, preset: VLMPreset | None
) -> None:
    """Run the program in a forked process, because the imports take ten seconds.

    With GPUs the imports start CUDA, which does not outlast a fork, so the process is a new one.
    """
    context = multiprocessing.get_context("spawn" if HAVE_CUDA else "forkserver")
    if not HAVE_CUDA:
        context.set_forkserver_preload(["examples.mimo.nemotron_vlm.loop.run", "sklearn.datasets"])
    process = context.Process(target=_program, args=(arguments, log, source, preset))
    process.start()
    process.join(ONE_RANK_TIMEOUT_S)
    process.kill()
    assert process.exitcode == 0, log.read_text()


def _program(
    arguments: list[str], log: Path, source: SampleSource | None, preset: VLMPreset | None
) -> None:
    from examples.mimo.nemotron_vlm.loop import run
    from examples.mimo.pretrain_nemotron_vlm import main

    if preset:
        PRESETS[preset.name] = lambda: preset
    if source:
        run.make_source = lambda args, encoder: source
    for name in filter(_is_of_this_process, list(os.environ)):
        del os.environ[name]
    with log.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
        sys.exit(main(arguments))


def _is_of_this_process(name: str) -> bool:
    """Whether the launcher, or a model that was built here, has set the variable."""
    return name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith(
        ("MASTER_", "TORCHELASTIC_", "GROUP_", "LOCAL_WORLD", "ROLE_", "NVTE_")
    )


def apart(records: list[dict], reference: list[dict]) -> dict[str, float]:
    """Return the largest relative differences of losses and gradient norms in any step; skipped
    steps, in which gradients are not finite, are left out.
    """
    pairs = [
        (one, other)
        for one, other in zip(records, reference, strict=True)
        if not (one["skipped"] or other["skipped"])
    ]
    names = ("loss", "grad_norm")
    return {name: max(abs(one[name] / other[name] - 1) for one, other in pairs) for name in names}


def assert_same_trajectory(records: list[dict], reference: list[dict]) -> None:
    """Assert that losses, gradient norms and token counts of every step agree."""
    for name, difference in apart(records, reference).items():
        steps = [(one[name], other[name]) for one, other in zip(records, reference, strict=True)]
        assert difference <= TOLERANCE, f"{name} differs by {difference} (relative): {steps}"
    assert [r["num_tokens"] for r in records] == [r["num_tokens"] for r in reference]
    assert not any(r["skipped"] for r in records)


def assert_same_trajectory_as_one_rank(
    encoder: str,
    language: str,
    *options: str,
    common: tuple[str, ...] = (),
    microbatches: int = 2,
    samples: int = SAMPLES,
    steps: int = COMPARED,
    source: SampleSource | None = None,
    preset: VLMPreset | None = None,
) -> None:
    """Train in the layouts (``language`` with its dp) and on one rank, and compare.

    Args:
        options: command-line arguments of the run in the layouts, which do not matter on one rank.
        common: command-line arguments of both runs.
        microbatches: number in a step, each of which costs all its collectives; with a pipeline,
            as many as stages.
        samples: number in the global batch.
        steps: number that are compared, of the ten of a run.
        source: gives samples in place of those that the arguments name.
        preset: sizes of another model.
    """
    other = {"source": source, "preset": preset}
    layout = parse_layout(language, "language")

    def batch(microbatches: int, dp: int) -> tuple[str, ...]:
        micro_size = samples // microbatches // dp
        return ("--global-batch-size", str(samples), "--micro-batch-size", str(micro_size), *common)

    count = layout.pp if layout.pp > 1 else microbatches
    layouts = ("--encoder", encoder, "--language", language)
    records = trajectory(*layouts, *batch(count, layout.dp), *options, steps=steps, **other)
    assert_same_trajectory(records, one_rank_trajectory(*batch(2, 1), steps=steps, **other))
