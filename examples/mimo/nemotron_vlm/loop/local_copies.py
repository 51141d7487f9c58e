# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Copies of a run between its checkpoints, each rank's on its own disk or in its own memory.

NVIDIA's resiliency extension writes them, one file a rank, which fits that rank's place in that
layout alone. A run that cannot go on from its copy goes on from the newest checkpoint.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from examples.mimo.nemotron_vlm.loop.terminal import LAYOUT, changes, say
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from megatron.core.models.mimo.optimizer import MimoOptimizer
from megatron.core.models.mimo.schedule.replaced import replaced

try:
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
        LocalCheckpointManager,
    )
except ImportError:
    LocalCheckpointManager = object  # refusals.py asks for it where it is needed

OF_A_COPY = [MCoreTensorAwareStateDict, ShardedTensor, ShardedObject]
"""Classes of a copy's file, beside those of a checkpoint; others are not unpickled."""


NOTE = "attempt.txt"
"""A file in ``--save``: without a checkpoint, a copy of an attempt whose note has gone is not its
run's."""


class DoesNotFitError(Exception):
    """A copy that lacks what the run asks for; raised on every rank, before anything is loaded."""


class Copy(NamedTuple):
    """A copy to go on from: its directory on this rank, named for the step, and its arguments."""

    directory: Path
    saved: Namespace


class LocalCopies:
    """Copies of a run; each method is collective.

    A run notes in ``args.attempt`` which attempt it is, and in ``args.begun_from`` the attempt that
    saved the checkpoint from which that began; whatever is saved has both. A copy continues the
    newest checkpoint if its attempt saved that or began from it. Else the run has since gone
    another way, without the copy.
    """

    def __init__(self, args: Namespace) -> None:
        attempt = [os.urandom(8).hex()]
        dist.broadcast_object_list(attempt)
        args.attempt, args.begun_from = attempt[0], None
        self._args = args
        self._manager, self._kept, self._has_saved = None, None, False
        if args.non_persistent_ckpt_type == "local":
            run = sha256(str(Path(args.save).resolve()).encode()).hexdigest()[:16]
            self._manager = _Files(args.non_persistent_local_ckpt_dir, run)
            self._note = Path(args.save) / NOTE

    def find(self, checkpoint: str | None) -> Copy | None:
        """Return the copy that continues the newest checkpoint, None if there is none.

        Args:
            checkpoint: the newest checkpoint's directory; None if the run has none yet.
        """
        args, name = self._args, Path(checkpoint or "").name
        if not self._manager or args.finetune or args.ckpt_step:
            return None
        step = self._manager.find_latest()
        if step <= (int(name[5:]) if name[5:].isdigit() else 0):
            return None
        of_copy, why = self._manager.arguments()
        if of_copy and (layout := changes(args, of_copy, LAYOUT)):
            why = f"of another layout: {layout}"
        elif of_copy and not self._continues(of_copy, checkpoint):
            why = f"the run has saved {checkpoint} since, without it"
            why = why if checkpoint else f"{args.save} has nothing of its run"
        directory = self._manager.local_ckpt_dir / f"iter_{step:07d}"
        if why:
            say(f"the copy of step {step} in {directory.parent} is not loaded: {why}", args)
            return None
        return Copy(directory, of_copy)

    def _continues(self, copy: Namespace, checkpoint: str | None) -> bool:
        """Return whether a copy is of the way on which the newest checkpoint lies; or, if there is
        none, of the attempt whose note is in ``--save``."""
        if checkpoint:
            saved, errors = _on_all_ranks(load_common_state_dict, checkpoint)
            attempt = getattr((saved or {}).get("args"), "attempt", None)
        else:
            attempt, errors = _on_all_ranks(self._note.read_text)
        return not errors and attempt in (copy.attempt, copy.begun_from)

    @contextmanager
    def in_use(self, copy: Copy, optimizer: MimoOptimizer | None, context: dict) -> Iterator[None]:
        """Make Megatron load a copy inside the block, as if its folder were ``--load``."""
        args = self._args
        instead = replaced(args, load=str(copy.directory.parent), pretrained_checkpoint=None)
        with instead, self._saved_by_rank(optimizer, context):
            yield
        args.attempt, args.begun_from = copy.saved.attempt, copy.saved.begun_from
        self._kept = int(copy.directory.name[5:])

    @contextmanager
    def none_in_use(self) -> Iterator[None]:
        """Make Megatron load no copy inside the block."""
        with replaced(self._args, non_persistent_ckpt_type=None):
            yield

    def save(self, save: Callable, iteration: int, *rest, **named) -> None:
        """Save a copy with Megatron's function, not asynchronously.

        The first one of a run deletes those that it has not loaded; each deletes older ones.

        Raises:
            CheckpointingException: on every rank, if any has not written its file.
        """
        optimizer, context = rest[1], rest[4]
        if not self._has_saved:
            _, errors = _on_all_ranks(self._begin)
            if errors:
                raise CheckpointingException(errors[0])
            self._has_saved = True
        with self._saved_by_rank(optimizer, context), replaced(self._args, async_save=False):
            save(iteration, *rest, **named)

    def _begin(self) -> None:
        """Delete this rank's copies of other runs; rank 0 notes which attempt these are of."""
        self._manager.keep(self._kept)
        if dist.get_rank() == 0:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            self._note.write_text(self._args.attempt)

    @contextmanager
    def _saved_by_rank(self, optimizer: MimoOptimizer | None, context: dict) -> Iterator[None]:
        """Let Megatron take this run's files, and the optimizer's state as each rank has it.

        Megatron refuses the format's name, whose states it would gather on some ranks alone.
        """
        context["local_checkpoint_manager"] = self._manager
        with ExitStack() as stack:
            stack.enter_context(replaced(self._args, dist_ckpt_optim_fully_reshardable=False))
            if optimizer:
                stack.enter_context(replaced(optimizer, saves_own_shards=True))
            stack.callback(self._manager.forget)
            yield


class _Files(LocalCheckpointManager):
    """The extension's files of one run, with its errors on every rank alike."""

    _read: "tuple[_Fitting, str] | None" = None

    def arguments(self) -> tuple[Namespace | None, str]:
        """Read this rank's newest file; return its arguments, or None and the reason."""
        saved, errors = _on_all_ranks(lambda: self.load()[0].to_state_dict(None)["args"])
        if not errors:
            return saved, ""
        self.forget()
        return None, f"its file is damaged on {errors[0]}"

    def load(self) -> "tuple[_Fitting, str]":
        """Return what this rank's newest file has; it is read once for Megatron's two calls."""
        if self._read is None:
            with torch.serialization.safe_globals(OF_A_COPY):
                state, _ = super().load()
            self._read = _Fitting(state), str(self.local_ckpt_dir)
        return self._read

    def forget(self) -> None:
        """Free what has been read, and look for files anew the next time."""
        self._read, self.latest_iteration = None, -1

    def keep(self, step: int | None) -> None:
        """Delete this rank's files of other steps."""
        self.forget()
        self._ensure_dir()
        for path in self.local_ckpt_dir.glob(self._filename_from_template("*", "*", "*")):
            if self._filename_to_id(path.name)[0] != step:
                path.unlink()

    def _save_fn(self, files: dict) -> None:
        torch.cuda.synchronize()  # tensors are on their way to the host
        _, errors = _on_all_ranks(super()._save_fn, files)
        if errors:
            self._cleanup_failed_save(next(iter(files))[0])
            raise CheckpointingException(errors[0])


class _Fitting:
    """What a file has; all ranks must find in theirs what they ask for, or none takes anything."""

    def __init__(self, state: MCoreTensorAwareStateDict) -> None:
        self._state = state

    def to_state_dict(self, asked: dict | None, **named) -> dict:
        if not asked:
            return self._state.to_state_dict(asked)
        found, errors = _on_all_ranks(self._state.to_state_dict, asked, **named)
        if errors:  # Megatron asserts that each part is there
            raise DoesNotFitError(f"it lacks parts of this run on {errors[0]}")
        return found


def _on_all_ranks(function: Callable, *arguments, **named) -> tuple[object, list[str]]:
    """Call a function on all ranks; return this one's result, and the errors of any."""
    result, error = None, None
    try:
        result = function(*arguments, **named)
    except Exception as raised:  # whatever is in a damaged file
        error = f"rank {dist.get_rank()}: {' '.join(str(raised).split())[:200]}"
    everywhere: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, error)
    return result, [each for each in everywhere if each]
