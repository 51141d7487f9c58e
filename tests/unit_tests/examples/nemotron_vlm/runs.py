# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Short training runs in this process, on all its ranks."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch.distributed as dist

from examples.mimo.nemotron_vlm.data import SampleSource, make_source
from examples.mimo.nemotron_vlm.loop.checkpoint_loading import safe_loading
from examples.mimo.nemotron_vlm.loop.forward_step import ACCURACY, LOSS, TOKENS, forward_step
from examples.mimo.nemotron_vlm.loop.run import Session, close_session, open_session
from examples.mimo.nemotron_vlm.model.presets import PRESETS, VLMPreset
from examples.mimo.nemotron_vlm.options.defaults import TRAINING
from examples.mimo.nemotron_vlm.options.run import Run
from megatron.core.enums import ModelType
from megatron.core.models.mimo.setup.module_groups import schedule_collection
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_model_config
from megatron.training import get_timers
from megatron.training import training as loop
from megatron.training.initialize import initialize_megatron
from tests.unit_tests.examples.nemotron_vlm import preloaded  # noqa: F401 (its parser is quick)
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

LOCAL = ("--transformer-impl", "local")
"""Megatron's own layers: in fp32, Transformer Engine's attention has neither packed rows nor CP."""

DEVICE = ("--device", "cuda", "--no-async-save", *LOCAL) if HAVE_CUDA else ("--device", "cpu")
"""Device and layers; tests/gpu has the layers of Transformer Engine, and asynchronous saves."""

STEPS = 10

SHORT_RUN = (*DEVICE, "--train-iters", str(STEPS), "--lr", "1e-4", "--adam-eps", "1e-3")
"""Options of ten steps. The epsilon is as large as the gradients: with a small one Adam makes full
steps of rounding, until a token takes the other of two equal experts, which is a jump."""

FOUR_LAYERS = ("--hybrid-layer-pattern", "ME*E")
"""Each kind of layer; both halves have experts, and each of four stages has a layer."""

SMALL = (*FOUR_LAYERS, "--global-batch-size", "8", "--micro-batch-size", "2")
"""Short steps, for what depends on no number of layers and samples."""

OWN_DEFAULTS = ("--lr", str(TRAINING["lr"]), "--adam-eps", str(TRAINING["adam_eps"]))
"""The program's own defaults."""


def options_of(*arguments: str, preset: VLMPreset | None = None) -> Run:
    """Parse a command line as the program does, on this world's ranks.

    Args:
        preset: sizes of a model in place of the one that the arguments name.
    """
    chosen = ()
    if preset:
        PRESETS[preset.name] = lambda: preset
        chosen = ("--model", preset.name)
    return Run.of([*SHORT_RUN, *arguments, *chosen], Utils.world_size)


@contextlib.contextmanager
def session_of(run: Run, source: SampleSource | None = None) -> Iterator[Session]:
    """The program with its groups made; all it made ends with the block."""
    source = source or make_source(run.args, run.preset)
    before = groups()
    session = open_session(run, source)
    try:
        yield session
    finally:
        close_session(session)
    assert groups() == before


def groups() -> set[dist.ProcessGroup]:
    """All process groups of this rank."""
    return set(dist.distributed_c10d._world.pg_map)


class Trainer:
    """Megatron's loop, taken step by step.

    Args:
        session: the program with its groups made.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.loading = session, session.loading
        self.args = session.run.args
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

    def train_step(
        self, around: Callable[[], AbstractContextManager] = contextlib.nullcontext
    ) -> dict:
        """Take one step of the loop; return its record on every rank.

        Args:
            around: makes the context in which forward and backward run, and gradients are reduced.
        """
        if self._batches is None:
            self._batches = RerunDataIterator(self.loading.training())
        schedule = get_forward_backward_func(schedule_pg_collection=self.collection)

        def forward_backward(**options):
            with around():
                return schedule(**options)

        reported, skipped, _, _, _, grad_norm, _, _ = loop.train_step(
            forward_step,
            self._batches,
            self.stages,
            self.optimizer,
            self.scheduler,
            self.config,
            forward_backward,
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
) -> Iterator[Trainer]:
    """A run of command-line arguments on this world's ranks, to be taken step by step.

    Args:
        source: gives samples in place of those that the arguments name.
        preset: sizes of another model.
    """
    Utils.initialize_distributed()
    with session_of(options_of(*arguments, preset=preset), source) as session:
        run = Trainer(session)
        try:
            yield run
        finally:
            run.__dict__.clear()  # the model, which the session frees
