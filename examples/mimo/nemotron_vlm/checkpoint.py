# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Save and resume a run with Megatron's distributed checkpoints.

A checkpoint is written as ``step_00000200.partial`` and renamed once it is whole, so a save that
was cut short is never the newest. ``run.json`` says which run it belongs to and is read before
any state is touched; file hashes are checked before anything is loaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import torch.distributed as dist

from examples.mimo.nemotron_vlm.agreement import agreed
from examples.mimo.nemotron_vlm.errors import UserError
from examples.mimo.nemotron_vlm.trainer import Trainer
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import verify_integrity_manifest

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""The optimizer's state by parameter, so that it can be loaded in another layout."""

WHOLE = re.compile(r"step_(\d{8})")


def newest(directory: Path) -> Path | None:
    """The whole checkpoint of the highest step under ``directory``."""
    if not directory.is_dir():
        return None
    named = (path for path in directory.iterdir() if WHOLE.fullmatch(path.name))
    whole = [path for path in named if (path / "run.json").exists()]
    return max(whole, default=None)


def check_save_directory(directory: Path, load: Path | None) -> None:
    """Refuse a directory that cannot be written, or that holds another run's checkpoints.

    Raises:
        UserError: naming the fact and the fix.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--save {directory}: cannot write there ({error.strerror})") from error
    found = newest(directory)
    if found and (load is None or load.resolve() != directory.resolve()):
        raise UserError(
            f"--save {directory} already holds {found.name}: "
            f"go on from it with --load {directory}, or choose another directory"
        )


def _identity(trainer: Trainer) -> dict:
    config = trainer.config
    return {
        "model": config.preset.name,
        "seed": config.seed,
        "data": config.data,
        "frozen": sorted(config.freeze),
    }


def _state(trainer: Trainer, is_loading: bool) -> dict:
    chunks = {
        f"model{number}": chunk.sharded_state_dict(metadata=METADATA)
        for number, chunk in enumerate(trainer.chunks)
    }
    optimizer = trainer.optimizer.sharded_state_dict(chunks, is_loading, metadata=METADATA)
    return {**chunks, "optimizer": optimizer}


def save(trainer: Trainer, directory: Path) -> None:
    """Write the run's state; whole on return, on every rank."""
    final = directory / f"step_{trainer.step:08d}"
    partial = final.with_name(final.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _state(trainer, is_loading=False) | {"scheduler": trainer.scheduler.state_dict()}
    dist_checkpointing.save(
        state, str(partial), async_strategy="mcore", verify_integrity=True
    )
    dist.barrier()
    if dist.get_rank() == 0:
        record = {"step": trainer.step, **_identity(trainer)}
        with (partial / "run.json").open("w") as file:
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(final)
        _sync_directory(directory)
    dist.barrier()


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load(trainer: Trainer, directory: Path) -> None:
    """Go on from the newest whole checkpoint under ``directory``.

    Raises:
        UserError: on every rank, before any state is touched, if there is none, it is damaged, or
            it belongs to another run.
    """
    found = newest(directory)
    agreed(lambda: _check(trainer, directory, found))
    _allocate_optimizer_state(trainer)
    state = _state(trainer, is_loading=True)
    loaded = dist_checkpointing.load(state, str(found))
    for number, chunk in enumerate(trainer.chunks):
        chunk.load_state_dict(loaded[f"model{number}"])
    trainer.optimizer.load_state_dict(loaded["optimizer"])
    trainer.scheduler.load_state_dict(loaded["scheduler"])
    trainer.step = json.loads((found / "run.json").read_text())["step"]


def _allocate_optimizer_state(trainer: Trainer) -> None:
    """Make the state that PyTorch's Adam makes at its first step, for the checkpoint to fill."""
    for module in trainer.optimizer.module_infos.values():
        if module.optimizer is None:
            continue
        for optimizer in getattr(module.optimizer, "chained_optimizers", [module.optimizer]):
            optimizer._init_optimizer_states_with_dummy_values()


def _check(trainer: Trainer, directory: Path, found: Path | None) -> None:
    if found is None:
        raise UserError(f"--load {directory}: no whole checkpoint there (step_NNNNNNNN/run.json)")
    try:
        record = json.loads((found / "run.json").read_text())
        wanted = _identity(trainer)
        for name, value in wanted.items():
            if record[name] != value:
                raise UserError(
                    f"--load {found} is of a run with {name} {record[name]}, this one has {value}"
                )
        verify_integrity_manifest(str(found))
    except (CheckpointingException, OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--load {found} is damaged: {reason}; remove it to go on from the one before"
        ) from error
