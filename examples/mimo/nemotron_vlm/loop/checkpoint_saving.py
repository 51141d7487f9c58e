# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Saves of a run: one that fails is reported in one line, and the next one tries again."""

import contextlib
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from examples.mimo.common.errors import UserError, one_line
from examples.mimo.nemotron_vlm.loop.all_ranks import LONGEST, on_all_ranks
from examples.mimo.nemotron_vlm.loop.best import Best
from examples.mimo.nemotron_vlm.loop.forward_step import SCORES
from examples.mimo.nemotron_vlm.loop.terminal import say
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.models.mimo.schedule.replaced import replaced
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.training import async_utils
from megatron.training.checkpointing import get_checkpoint_tracker_filename
from megatron.training.global_vars import get_energy_monitor, get_timers

RAISED_BY_ALL = CheckpointException, CheckpointingException
"""Errors of a save that every rank raises."""

PROBE = bytes(4096)
"""Bytes that each rank writes, and deletes again, before a save: a block of a file system."""


class Saves:
    """Saves of a run with Megatron's function, which go on after one that failed.

    A save that fails leaves the checkpoint before it the newest, and its own files are deleted.
    After an asynchronous one, the saves of this run are synchronous: its writer may be at fault.
    If that was the last save, it is made again at once.

    Args:
        save: Megatron's function that saves. evaluate: its function that evaluates.

    Attributes:
        best: the best checkpoint, which ``--keep-best`` keeps.
        loaded: directories of checkpoints from which this run has gone on.
        begun_with: the checkpoint whose weights alone this run has taken.
    """

    def __init__(self, args: Namespace, save: Callable, evaluate: Callable) -> None:
        self._args, self._save, self._evaluate = args, save, evaluate
        self.best = Best(args)
        self._failed: UserError | None = None
        self._again: Callable[[], None] | None = None  # makes a failed asynchronous save
        self._made: Path | None = None
        self.loaded: set[Path] = set()
        self.begun_with: Path | None = None
        self._all_made: set[Path] = set()
        self._whole: Path | None = None  # the last one that has come to its end

    @contextlib.contextmanager
    def all_made(self) -> Iterator[None]:
        """Check at the end of the block, also by the exit of Megatron's loop, the last save.

        Raises:
            UserError: it has failed; on all ranks.
        """
        exited = None
        try:
            yield
        except SystemExit as end:
            if end.code:
                raise
            exited = end
        if self._failed and self._again:  # while the state is still that step's
            self._again()
        if self._failed or exited:
            raise self._failed or exited

    def evaluate(self, *rest, **named) -> tuple:
        """Evaluate, and note the score; it may be of a step that has been saved."""
        result = self._evaluate(*rest, **named)
        if self._args.keep_best and not self._args.skip_train:
            step = self._args.curr_iteration + 1
            score = (result[0] or {}).get(SCORES[self._args.keep_best])
            self.best.note(step, None if score is None else float(score))
            if self._whole == self._directory(step):
                self._keep_best(step)
        return result

    def _directory(self, step: int) -> Path:
        return Path(self._args.save or "", f"iter_{step:07d}")

    def _keep_best(self, step: int) -> None:
        """Note that a save has come to its end; delete what was the best, but not the newest."""
        self._whole, kept = self._directory(step), self._args.save_retain_interval
        before = self._args.keep_best and self.best.saved(step)
        if before and kept and before % kept and self._is_own(self._directory(before)):
            self._delete(self._directory(before))

    def save(self, iteration: int, *rest, **named) -> None:
        """Save, but not over the newest checkpoint, loaded or made, as long as no step is new.

        A run that had nothing left to do, or whose batch grows after a save, would else write the
        last good one anew, at the risk of it. One that was made is written again if Megatron notes
        in it that a step is to be run again. Without ``--save`` nothing is saved: Megatron saves
        before it ends with a result that is not finite.
        """
        args, self._again = self._args, None
        directory = self._directory(iteration)
        if not args.save or directory.resolve() in self.loaded:
            return
        asks_again = get_rerun_state_machine().state is RerunState.WILL_RERUN_FROM_CHECKPOINT
        if directory == self._made and not asks_again:
            return
        if directory.resolve() == self.begun_with:
            why = "its folder has the weights that this run began with; another --save keeps both"
            self._note(directory, why)
            return
        if errors := on_all_ranks(partial(_try_to_write, directory))[1]:
            with contextlib.suppress(OSError):
                directory.rmdir()  # unless an earlier run has saved there
            self._note(directory, errors[0])
            return
        try:
            with self._deleting_its_own():
                self._save(iteration, *rest, **named)
        except RAISED_BY_ALL as error:
            self._note(directory, _cause(error))
            self._delete(directory)
            _go_on()
            return
        self._made = directory
        self._all_made.add(directory)
        queue = async_utils._async_calls_queue
        if args.async_save and queue.async_calls:
            request, again = queue.async_calls[-1].async_request, partial(self.save, iteration)
            finish, again = [*request.finalize_fns], partial(again, *rest, **named)
            request.finalize_fns[:] = [partial(self._finish, directory, finish, again)]
        else:
            self._failed = None
            self._keep_best(iteration)

    def _finish(
        self, directory: Path, steps: list[Callable[[], object]], again: Callable[[], None]
    ) -> None:
        """End an asynchronous save, once all ranks have written."""
        try:
            if not self._args.async_save:  # it would take what is left of that one's results
                raise CheckpointingException("the save before it failed")
            with self._deleting_its_own():
                for step in steps:
                    step()
            self._failed = None
            self._keep_best(int(directory.name[5:]))
        except RAISED_BY_ALL as error:
            self._note(directory, _cause(error))
            self._delete(directory)
            self._args.async_save, self._again = False, again
            async_utils._async_calls_queue.close(abort=True)

    def _note(self, directory: Path, cause: str) -> None:
        args, iteration = self._args, int(directory.name[5:])
        self._made, free = None, "?"
        with contextlib.suppress(OSError):  # Megatron's writer names the error's class only
            free = f"{shutil.disk_usage(args.save).free / 1e9:.2f}"
        text = (
            f"--save {args.save}: step {iteration} was not saved: {cause}; {free} GB are free there"
        )
        self._failed = UserError(f"{text}; the checkpoint before it is as it was")
        if iteration != args.train_iters:
            say(f"warning: {text}; the next save tries again", args)

    def _delete(self, directory: Path) -> None:
        """Delete what a save has written, but not where the tracker's file names its step."""
        if self._args.rank == 0 and self._newest() != directory:
            shutil.rmtree(directory, ignore_errors=True)

    def _newest(self) -> Path | None:
        """Return the directory that the tracker's file names; None if it names no step."""
        with contextlib.suppress(OSError, ValueError):
            step = int(Path(get_checkpoint_tracker_filename(self._args.save)).read_text())
            return Path(self._args.save, f"iter_{step:07d}")

    def _deleting_its_own(self) -> AbstractContextManager:
        """Keep the newest checkpoint inside the block, unless this run made it or went on from it.

        The best one is kept in any case.

        ``--save-retain-interval`` makes Megatron delete the one before. That may be the source of a
        new run, and none at all: the tracker of a converted checkpoint names no step.
        """
        newest = self._newest()
        if newest and newest != self._directory(self.best.step) and self._is_own(newest):
            return nullcontext()
        return replaced(self._args, save_retain_interval=None)

    def _is_own(self, directory: Path) -> bool:
        """Return whether this run made a checkpoint, or went on from it."""
        return directory in self._all_made or directory.resolve() in self.loaded


def _go_on() -> None:
    """Resume what a failed save has stopped, and stop its timer."""
    get_energy_monitor().resume()
    get_timers()("save-checkpoint", log_level=0).stop(barrier=False)
    get_timers()("interval-time", log_level=0).start(barrier=True)


def _try_to_write(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(PROBE)


def _cause(error: CheckpointException | CheckpointingException) -> str:
    """Return the reason; collective, as PyTorch tells it to the first rank alone."""
    no_result = "results_queue should not be empty"
    said = [one_line(error)[:LONGEST]]
    if isinstance(error, CheckpointException):
        for rank, (cause, _) in list(error.failures.items())[:1]:
            text = one_line(cause)[:LONGEST]
            said = [f"rank {rank}: {text.replace(no_result, 'its writing process has ended')}"]
        dist.broadcast_object_list(said)
    return said[0]
