# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Copies of a run between its checkpoints, each rank's on its own disk or in its own memory.

NVIDIA's resiliency extension writes them, one file a rank. All ranks decide together, before
Megatron loads anything, whether they go on from their copies or from the newest checkpoint.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.loop.all_ranks import on_all_ranks, one_line
from examples.mimo.nemotron_vlm.loop.resume_rules import check_resume
from examples.mimo.nemotron_vlm.loop.terminal import LAYOUT, OTHERS, changes, say
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from megatron.core.models.mimo.schedule.replaced import replaced

try:
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
        LocalCheckpointManager,
    )
except ImportError:
    LocalCheckpointManager = object  # refusals.py asks for it where it is needed

OF_A_COPY = [MCoreTensorAwareStateDict, ShardedTensor, ShardedObject]
"""Classes of a copy's file, beside those of a checkpoint; others are not unpickled."""

FORM = (
    *(*LAYOUT, "world_size", "model", "hybrid_layer_pattern", "mtp_num_layers", "freeze"),
    *("transformer_impl", "moe_grouped_gemm"),
    *(*OTHERS["another precision"], "accumulate_allreduce_grads_in_fp32"),
    *("use_distributed_optimizer", "num_distributed_optimizer_instances"),
    *("optimizer_cpu_offload", "optimizer_offload_fraction"),
    *("overlap_grad_reduce", "ddp_bucket_size", "ddp_num_buckets"),
    "ddp_pad_buckets_for_high_nccl_busbw",
)
"""Arguments that decide which tensors a rank's copy has."""

NOTE = "attempt.txt"
"""A file in ``--save`` with the first of the attempts that copies hold. As long as there is no
checkpoint, it tells the run's copies from those of another, or of one whose folder was emptied."""


class NotWrittenError(CheckpointingException):
    """A copy was not written; raised on every rank."""


class LocalCopies:
    """Copies of a run; each method is collective.

    Each start of the program is an attempt with an id of its own. ``args.attempts``, which
    checkpoints and copies hold, has the id of the attempt that saved the checkpoint from which the
    run went on, those of the attempts since then that copies have continued, and this attempt's;
    each with the step at which the run left it, None for this one. A copy continues a checkpoint
    if the attempt that saved that is among the copy's, and was not left before.
    """

    def __init__(self, args: Namespace) -> None:
        run = sha256(str(Path(args.save or "").resolve()).encode()).hexdigest()[:16]
        chosen = [os.urandom(8).hex(), run]
        dist.broadcast_object_list(chosen)
        attempt, run = chosen
        args.attempts = [(attempt, None)]
        self._args = args
        self._files = _Files(args, run) if args.non_persistent_ckpt_type == "local" else None

    def find(self, checkpoint: str | None) -> tuple[str, Namespace] | None:
        """Return the copy that continues the newest checkpoint, None if there is none.

        Args:
            checkpoint: the newest checkpoint's directory; None if the run has none yet.

        Returns:
            A directory of this rank, named for the copy's step, and the arguments in the copy.
        """
        args, files = self._args, self._files
        if not files or args.finetune or args.ckpt_step:
            return None
        reached, step = step_of(checkpoint or ""), files.find_latest()
        of_ranks = [{step for step, *_ in ids} for ids in files.globally_available_ids]
        if step > reached:
            why = self._why_not(checkpoint, reached)
        elif (step := max(set.union(*of_ranks), default=0)) > reached:
            lack = [str(rank) for rank, steps in enumerate(of_ranks) if step not in steps]
            why = f"there is none on rank {', '.join(lack)}"
        else:
            return None
        if why:
            files.state = None
            say(f"the copy of step {step} in {files.local_ckpt_dir} is not loaded: {why}", args)
            return None
        return str(files.local_ckpt_dir / f"iter_{step:07d}"), files.state.common["args"]

    def _why_not(self, checkpoint: str | None, reached: int) -> str | None:
        """Read the newest copy; return why no rank may go on from its own, None if all may."""
        found, errors = on_all_ranks(lambda: self._read(checkpoint, reached))
        if errors:
            return f"its file cannot be read on {errors[0]}"
        if any(attempts != found[0][0] for attempts, _ in found):
            return "ranks have files of different attempts"
        return next((why for _, why in found if why), None)

    def _read(self, checkpoint: str | None, reached: int) -> tuple[list[tuple], str | None]:
        """Read this rank's newest copy; return its attempts, and why it is not to be loaded."""
        args, saved, note = self._args, self._files.read(), Path(self._args.save, NOTE)
        try:
            check_resume(args, saved)
            if checkpoint:
                before = attempt_of(checkpoint, load_common_state_dict(checkpoint).get("args"))
            else:
                before = note.read_text() if note.is_file() else None
        except UserError as error:
            why = str(error).removeprefix(f"--load {args.load}: ")
        except (Exception, CheckpointException):  # whatever is in a damaged checkpoint
            why = f"{checkpoint or note} cannot be read"
        else:
            why = f"it does not continue {checkpoint}"
            why = why if checkpoint else f"{args.save} has nothing of its run"
            if before in [one for one, left in saved.attempts if left is None or left >= reached]:
                why = None
        if others := changes(args, saved, FORM):
            why = f"of other options: {others}"
        return saved.attempts, why

    @contextmanager
    def loading(self, copy: tuple[str, Namespace] | None, context: dict) -> Iterator[None]:
        """Make Megatron load a copy inside the block, as if its folder were ``--load``; or none.

        Raises:
            UserError: the copy lacks what the run asks for.
        """
        args = self._args
        if not copy:
            with replaced(args, non_persistent_ckpt_type=None):
                yield
            return
        context["local_checkpoint_manager"], folder = self._files, self._files.local_ckpt_dir
        try:
            with replaced(args, load=str(folder), pretrained_checkpoint=None):
                yield
        except (CheckpointingException, AssertionError, ValueError) as error:
            text = f"the copies in {folder.parent} do not fit this run: {one_line(error)}"
            raise UserError(f"{text}; delete {folder.parent}") from error
        *before, (last, _) = copy[1].attempts
        args.attempts = [*before, (last, step_of(copy[0])), *args.attempts]
        self._files.state = None

    def save(self, save: Callable, iteration: int, *rest, **named) -> None:
        """Save a copy with Megatron's function, not asynchronously.

        Each rank saves the optimizer's state as it has it. Megatron refuses the format's name, for
        which it would gather the state on some ranks.

        Raises:
            NotWrittenError: on every rank, if any has not written its file.
        """
        optimizer, context = rest[1], rest[4]
        context["local_checkpoint_manager"] = self._files
        as_is = replaced(self._args, async_save=False, dist_ckpt_optim_fully_reshardable=False)
        with as_is, replaced(optimizer, saves_own_shards=True):
            save(iteration, *rest, **named)


class _Files(LocalCheckpointManager):
    """The extension's files of one run; errors are raised on every rank alike.

    Attribute ``state``: what has been read of this rank's newest file.
    """

    state: MCoreTensorAwareStateDict | None = None

    def __init__(self, args: Namespace, run: str) -> None:
        super().__init__(args.non_persistent_local_ckpt_dir, run)
        self._args = args

    def _my_ckpt_ids(self) -> list[tuple]:
        with suppress(OSError):
            return list(super()._my_ckpt_ids())
        return []

    def read(self) -> Namespace:
        """Read this rank's newest file, and return the arguments in it."""
        with torch.serialization.safe_globals(OF_A_COPY):
            self.state, _ = super().load()
        return self.state.common["args"]

    def load(self) -> "tuple[_Files, str]":
        """Return what Megatron asks in its two looks at a copy."""
        return self, str(self.local_ckpt_dir)

    def to_state_dict(self, asked: dict | None, **_: object) -> dict:
        """Return what Megatron asks of the file that has been read.

        Raises:
            CheckpointingException: on every rank, if any file lacks a part.
        """
        found: list[dict] = []

        def take() -> None:  # without validation, which would be collective
            found.append(self.state.to_state_dict(asked, validate_access_integrity=False))

        if errors := on_all_ranks(take)[1]:
            raise CheckpointingException(errors[0])
        return found[0]

    def save(
        self, state: MCoreTensorAwareStateDict, iteration: int, is_async: bool = False
    ) -> None:
        """Write this rank's file, and delete older ones once all ranks have theirs; also those of
        ranks that this node no longer has."""
        _, errors = on_all_ranks(lambda: self._write(state, iteration))
        folders = [self.local_ckpt_dir] if errors else list(self.local_ckpt_dir.parent.iterdir())
        for folder in folders:
            for path in folder.glob(self._filename_from_template("*", "*", "*")):
                if (self._filename_to_id(path.name)[0] == iteration) == bool(errors):
                    with suppress(OSError):  # another rank may delete it, too
                        path.unlink()
        if errors:
            raise NotWrittenError(errors[0])

    def _write(self, state: MCoreTensorAwareStateDict, iteration: int) -> None:
        note, first = Path(self._args.save, NOTE), self._args.attempts[0][0]
        if self.rank == 0 and not (note.is_file() and note.read_text() == first):
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(first)
        for left in self.local_ckpt_dir.glob(self._filename_from_template("*", "*", ".dirty")):
            left.unlink()  # of a process that was killed while it wrote
        state.copy_tensors_to_cpu(non_blocking=True)
        torch.cuda.synchronize()
        self._save(state, self._ckpt_id(iteration))


def attempt_of(checkpoint: str, saved: Namespace | None) -> str:
    """Return the id of the attempt that saved a checkpoint; its time, if that has not noted one."""
    noted = getattr(saved, "attempts", None)
    return noted[-1][0] if noted else str(Path(checkpoint, CONFIG_FNAME).stat().st_mtime_ns)


def step_of(directory: str) -> int:
    """Return the step of a checkpoint or copy; 0 for one that has none, as ``release``."""
    name = Path(directory).name[5:]
    return int(name) if name.isdigit() else 0
