# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The best checkpoint of a run by a held-out score: a file in its folder names it."""

import contextlib
import json
import math
from argparse import Namespace
from pathlib import Path

import torch.distributed as dist

from examples.mimo.common.errors import UserError, one_line
from examples.mimo.nemotron_vlm.loop.terminal import say
from megatron.core.dist_checkpointing.first_rank import on_first_rank, whole_file

FILE = "best.json"
"""The file: ``{"step": 20, "eval_loss": 0.31}``."""


class Best:
    """Scores of a run's evaluations, and the best of its checkpoints; equal on all ranks.

    Attributes:
        step: of the best checkpoint; 0 if there is none.
    """

    def __init__(self, args: Namespace) -> None:
        self._args, self._scores, self._score = args, {}, None
        self.step = 0

    def resume(self) -> None:
        """Take the best checkpoint of the folder in which the run goes on; collective.

        It stays without ``--keep-best``, too, as the folder's file names it, and by another score
        until the first checkpoint that has one.
        """
        found = on_first_rank(_read)(Path(self._args.save), self._args.keep_best)
        self.step, self._score = found

    def note(self, step: int, score: float | None) -> None:
        """Note the score of a step, which the last rank has; collective."""
        said = [score]
        dist.broadcast_object_list(said, self._args.world_size - 1)
        if said[0] is not None and math.isfinite(said[0]):
            self._scores[step] = said[0]

    def saved(self, step: int) -> int:
        """Name a whole checkpoint the best if it is; return the step of the one before, else 0.

        Where the file cannot be written, the one before stays the best. Collective.
        """
        score, before = self._scores.get(step), self.step
        if score is None or not (step == before or self._is_better(score)):
            return 0
        is_written = [self._args.rank == 0 and self._write(step, score)]
        dist.broadcast_object_list(is_written)  # any rank may read the file now
        if not is_written[0]:
            return 0
        self.step, self._score = step, score
        return before if before != step else 0

    def _is_better(self, score: float) -> bool:
        if self._score is None:
            return True
        is_lower = score < self._score
        return is_lower if self._args.keep_best == "eval_loss" else score > self._score

    def _write(self, step: int, score: float) -> bool:
        """Write the file; return whether it could be written."""
        file = Path(self._args.save, FILE)
        try:
            with whole_file(str(file), open) as best:
                best.write(json.dumps({"step": step, self._args.keep_best: score}))
        except OSError as error:
            say(f"warning: {file}: cannot write it: {one_line(error)}", self._args)
            return False
        return True


def _read(folder: Path, name: str | None) -> tuple[int, float | None]:
    """Return step and score of the best checkpoint: 0 if there is none, None by another score."""
    step, score = 0, None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / FILE).read_text())
        step = int(found["step"])
        score = float(found[name])
    return step, score


def best_of(folder: Path) -> Path:
    """Return the directory of the best checkpoint in a folder.

    Raises:
        UserError: no file there names one.
    """
    try:
        return folder / f"iter_{int(json.loads((folder / FILE).read_text())['step']):07d}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder}/best: {FILE} there names no checkpoint; --keep-best eval_loss writes it"
        ) from error
