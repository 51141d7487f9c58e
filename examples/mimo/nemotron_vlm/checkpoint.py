# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Save and resume a run with Megatron's distributed checkpoints, in any layout.

Weights and optimizer state are saved by global name and index, and loaded by whichever ranks need
them. ``run.json`` is read, and all files are hashed, before any state is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from examples.mimo.nemotron_vlm import progress
from examples.mimo.nemotron_vlm.agreement import agreed
from examples.mimo.nemotron_vlm.checkpoint_record import (
    Record,
    check_save_directory,
    damaged,
    layout_signature,
    newest,
)
from examples.mimo.nemotron_vlm.errors import RunFailed, UserError
from examples.mimo.nemotron_vlm.trainer import Trainer
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.safe_loading import no_code_from_checkpoints
from megatron.core.dist_checkpointing.serialization import verify_integrity_manifest
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.mimo.joint_optimizer import leaves
from megatron.core.tensor_parallel.random import _get_all_rng_states, _set_all_rng_states

__all__ = ["CheckpointWriter", "check_save_directory", "load", "newest", "save"]

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""The optimizer's state by parameter, so that it can be loaded in another layout."""


def _state(trainer: Trainer, is_loading: bool) -> dict:
    stages = {
        f"model{number}": stage.sharded_state_dict(metadata=METADATA)
        for number, stage in enumerate(trainer.stages)
    }
    optimizer = trainer.optimizer.sharded_state_dict(stages, is_loading, metadata=METADATA)
    return {**stages, "optimizer": optimizer}


def _random_state() -> ShardedObject:
    """Of this rank; only the same rank of the same layout has a use for it."""
    ranks = (dist.get_world_size(),)
    return ShardedObject("rng", _get_all_rng_states(), ranks, (dist.get_rank(),))


class CheckpointWriter:
    """Saves a run's states, one after the other.

    Args:
        directory: for the checkpoints.
        asynchronous: write in the background, while training goes on; a checkpoint is whole after
            a later call of :meth:`poll`, the next :meth:`save`, or :meth:`finish`.
    """

    def __init__(self, directory: Path, asynchronous: bool = False) -> None:
        self._directory = directory
        self._queue = AsyncCallsQueue() if asynchronous else None

    def save(self, trainer: Trainer) -> None:
        """Write the run's state; collective. Whole on return, unless asynchronous."""
        self.finish()
        final = self._directory / f"step_{trainer.step:08d}"
        partial = final.with_name(final.name + ".partial")
        if trainer.step == trainer.skipped:
            _allocate_optimizer_state(trainer)
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        record = Record.of(trainer.config, trainer.step, trainer.skipped)
        progress.note(f"saving step {trainer.step}, writing", patience=2)
        with _failed_writes_named(self._directory):
            request = dist_checkpointing.save(
                _state(trainer, is_loading=False)
                | {"scheduler": trainer.scheduler.state_dict(), "rng": _random_state()},
                str(partial),
                async_sharded_save=self._queue is not None,
                async_strategy="mcore",
                verify_integrity=True,
            )
        if request is None:
            _publish(partial, final, record)
        else:
            request.add_finalize_fn(lambda: _publish(partial, final, record))
            self._queue.schedule_async_request(request)

    def poll(self) -> None:
        """Publish what has been written on all ranks; collective, and does not wait."""
        self._finalize(blocking=False)

    def finish(self) -> None:
        """Wait until the last save is whole; collective."""
        self._finalize(blocking=True)

    def _finalize(self, blocking: bool) -> None:
        if self._queue is not None and self._queue.async_calls:
            progress.note("finishing a save", patience=2)
            with _failed_writes_named(self._directory):
                self._queue.maybe_finalize_async_calls(blocking=blocking)


@contextlib.contextmanager
def _failed_writes_named(directory: Path) -> Iterator[None]:
    """Megatron tells all ranks when one could not write; only rank 0 knows which."""
    try:
        yield
    except CheckpointException as error:
        reasons = [
            f"rank {rank}: {' '.join(str(failure[0]).split())}"
            for rank, failure in error.failures.items()
        ]
        raise RunFailed(
            f"--save {directory}: a checkpoint could not be written, by {'; '.join(reasons)} (is "
            "the disk full?); the ones before are whole"
        ) from error


def save(trainer: Trainer, directory: Path) -> None:
    """Write the run's state; whole on return, on every rank."""
    CheckpointWriter(directory).save(trainer)


def _publish(partial: Path, final: Path, record: Record) -> None:
    """Give a checkpoint its name, once every rank has written its part; collective."""
    progress.note(f"saving step {record.step}, publishing")
    dist.barrier()
    if dist.get_rank() == 0:
        record.write(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        handle = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    dist.barrier()


@no_code_from_checkpoints()
def load(trainer: Trainer, directory: Path) -> None:
    """Go on from the newest whole checkpoint under ``directory``; collective.

    Raises:
        UserError: on every rank, before any state is touched, if there is none, it is damaged, or
            it belongs to another run or model.
    """
    chosen = [newest(directory)]
    dist.broadcast_object_list(chosen)
    (found,) = chosen
    record = agreed(lambda: _read_record(trainer, directory, found))
    agreed(lambda: _read_manifest(found))
    agreed(lambda: _verify(found))
    _allocate_optimizer_state(trainer)
    state = _state(trainer, is_loading=True)
    if record.layout == layout_signature(trainer.config):
        state["rng"] = _random_state()
    agreed(lambda: _check_shapes(state, found))
    loaded = agreed(lambda: _read_state(state, found))
    for number, stage in enumerate(trainer.stages):
        stage.load_state_dict(loaded[f"model{number}"])
    trainer.optimizer.load_state_dict(loaded.get("optimizer", {}))
    trainer.scheduler.load_state_dict(loaded["scheduler"])
    if "rng" in state:
        _set_all_rng_states(*loaded["rng"])
    trainer.step, trainer.skipped = record.step, record.skipped


def _read_record(trainer: Trainer, directory: Path, found: Path | None) -> Record:
    if found is None:
        raise UserError(f"--load {directory}: no whole checkpoint there (step_NNNNNNNN/run.json)")
    record = Record.read(found)
    record.check_same_run(trainer.config, found)
    return record


def _read_manifest(found: Path) -> None:
    """Megatron reads it on rank 0 alone, where anything unexpected would leave the others waiting.

    A missing one it reports itself.
    """
    path = found / "integrity.json"
    try:
        if path.exists() and not isinstance(json.loads(path.read_text())["files"], dict):
            raise ValueError("integrity.json lists no files")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(found, error) from error


def _verify(found: Path) -> None:
    try:
        verify_integrity_manifest(str(found))
    except (CheckpointingException, OSError) as error:
        raise damaged(found, error) from error


def _check_shapes(state: dict, found: Path) -> None:
    """Megatron compares them too, but has cleared the embeddings by then, and ranks may differ."""
    try:
        saved = dist_checkpointing.load_tensors_metadata(str(found))
    except (CheckpointingException, UnpicklingError, OSError, ValueError, KeyError) as error:
        raise _unfit(found, error) from error
    for part in nested_values(state):
        if not isinstance(part, ShardedTensor) or part.allow_shape_mismatch:
            continue
        if part.key in saved and saved[part.key].global_shape != part.global_shape:
            error = ValueError(
                f"{part.key} has shape {tuple(saved[part.key].global_shape)} there and "
                f"{tuple(part.global_shape)} here"
            )
            raise _unfit(found, error)


def _read_state(state: dict, found: Path) -> dict:
    try:
        return dist_checkpointing.load(state, str(found), strict=StrictHandling.RAISE_UNEXPECTED)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()] or [error]
        raise _unfit(found, causes[0]) from error
    except (CheckpointingException, UnpicklingError, OSError, ValueError, KeyError) as error:
        raise _unfit(found, error) from error


def _unfit(found: Path, error: BaseException) -> UserError:
    reason = " ".join(str(error).split())[:600]
    return UserError(f"--load {found} does not fit this model: {reason}")


def _allocate_optimizer_state(trainer: Trainer) -> None:
    """Make the state that Adam makes at its first step: to be filled, or saved before that step.

    It takes a step of length 0: weights stay as they are, should the checkpoint be refused.
    """
    for module in trainer.optimizer.module_infos.values():
        for optimizer in leaves(module.optimizer) if module.optimizer else []:
            groups = optimizer.optimizer.param_groups
            settings = [(group["lr"], group["weight_decay"]) for group in groups]
            for group in groups:
                group["lr"] = group["weight_decay"] = 0.0
            optimizer._init_optimizer_states_with_dummy_values()
            for group, (lr, weight_decay) in zip(groups, settings, strict=True):
                group["lr"], group["weight_decay"] = lr, weight_decay
                if "step" in group:
                    group["step"] = 0
            for state in optimizer.optimizer.state.values():
                if "step" in state:
                    state["step"].zero_()
