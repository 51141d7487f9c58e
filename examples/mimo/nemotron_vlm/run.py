# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A whole run on one rank: set up, resume, train, evaluate, save, report."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from examples.mimo.nemotron_vlm import checkpoint, progress
from examples.mimo.nemotron_vlm.agreement import agreed
from examples.mimo.nemotron_vlm.cli import RunConfig
from examples.mimo.nemotron_vlm.data import make_source
from examples.mimo.nemotron_vlm.errors import RunFailed, UserError
from examples.mimo.nemotron_vlm.evaluation import evaluate, read_samples
from examples.mimo.nemotron_vlm.fault_watch import FaultWatch
from examples.mimo.nemotron_vlm.grids import make_modules, prepare_megatron
from examples.mimo.nemotron_vlm.joining import join_ranks
from examples.mimo.nemotron_vlm.metrics import MetricsWriter, read_metrics
from examples.mimo.nemotron_vlm.parameter_table import count_parameters, format_table
from examples.mimo.nemotron_vlm.placement import layout_table
from examples.mimo.nemotron_vlm.trainer import BACKENDS, Trainer, build_model

READINGS = 12
"""Test samples in the report's picture."""

WARM_UP = {"cpu": 1, "cuda": 20}
"""Times --fault-timeout for the first step and evaluation: GPUs first compile kernels."""


def run(config: RunConfig) -> None:
    """Carry the run out; collective over all ranks.

    Raises:
        UserError: on every rank alike, for bad input.
    """
    join_ranks(BACKENDS[config.device])
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    watch = FaultWatch(config.fault_timeout) if dist.get_world_size() > 1 else None
    try:
        _dry_run(config) if config.dry_run else _train(config)
    except Exception as error:
        if watch and not isinstance(error, UserError | RunFailed):
            watch.end_after(error)
        raise
    finally:
        if watch:
            watch.stop()
        dist.destroy_process_group()


def _dry_run(config: RunConfig) -> None:
    modules = make_modules(config.layouts, BACKENDS[config.device])
    prepare_megatron(modules, config.seed)
    with torch.device("meta"):
        (model,) = build_model(config, modules)
    print(format_table(count_parameters(model, config.preset)))


def _train(config: RunConfig) -> None:
    config = _restarted(config)
    source = make_source(
        config.data, config.preset.encoder, config.layouts.batch.seq_length, config.seed
    )
    agreed(lambda: _check_outputs(config))
    progress.note("building the model", patience=3)
    trainer = Trainer(config, source)
    if config.load:
        progress.note(f"loading from {config.load}", patience=3)
        checkpoint.load(trainer, config.load)
    saver = checkpoint.CheckpointWriter(config.save, config.async_save) if config.save else None
    writer = None
    if dist.get_rank() == 0:
        print(_banner(config), flush=True)
        writer = MetricsWriter(config.metrics_out, trainer.step, config.steps)
    record = {}
    try:
        while trainer.step < config.steps:
            record = _step(config, trainer, saver, writer)
    except (UserError, RunFailed):  # on all ranks alike
        if saver:
            saver.finish()
        raise
    if saver:
        saver.finish()
    progress.note("finishing")
    readings = read_samples(trainer, READINGS) if config.report else []
    if writer:
        writer.close()
        _print_outcome(config, record, readings)


def _step(config: RunConfig, trainer: Trainer, saver, writer: MetricsWriter | None) -> dict:
    if saver:
        saver.poll()
    with progress.first_time("training", WARM_UP[config.device]):
        record = trainer.train_step()
    last = trainer.step == config.steps
    if config.eval_interval and (last or trainer.step % config.eval_interval == 0):
        with progress.first_time("evaluation", WARM_UP[config.device]):
            record |= evaluate(trainer, config.eval_samples)
    if writer:
        writer.write(record)
    due = config.save_interval and trainer.step % config.save_interval == 0
    if saver and (last or due):
        progress.note(f"saving step {trainer.step}")
        saver.save(trainer)
    return record


def _restarted(config: RunConfig) -> RunConfig:
    """With ``--restart-from-latest``, load from where the run before saved, if it did."""
    if not config.restart_from_latest:
        return config
    found = [checkpoint.newest(config.save)]
    dist.broadcast_object_list(found)
    return replace(config, load=config.save if found[0] else None)


def _banner(config: RunConfig) -> str:
    lay = config.layouts
    return (
        f"{config.preset.name} on {dist.get_world_size()} ranks, {lay.placement}; "
        f"{lay.num_microbatches} microbatches of {lay.batch.micro_size} × dp "
        f"{lay.language.dp} samples a step\n{layout_table(lay)}"
    )


def _check_outputs(config: RunConfig) -> None:
    if config.save:
        checkpoint.check_save_directory(config.save, config.load)
    for option, path in (("--metrics-out", config.metrics_out), ("--report", config.report)):
        if path:
            _check_writable(option, path)


def _check_writable(option: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        with path.open("a"):
            pass
        if not existed:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{option} {path}: cannot write there ({error.strerror})") from error


def _print_outcome(config: RunConfig, last: dict, readings: list) -> None:
    records = read_metrics(config.metrics_out) if config.metrics_out else [last]
    if records and "eval_accuracy" in records[-1]:
        print(f"held-out digit accuracy: {records[-1]['eval_accuracy']:.1%}")
    if config.report and records:
        # matplotlib is slow to import, and only this rank draws.
        from examples.mimo.nemotron_vlm.report import draw_report

        draw_report(config.report, records, readings)
        print(f"picture: {config.report.absolute()}")
