# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What this program adds to Megatron's loading of checkpoints: no code runs, refusals are one line.

Random states are of one layout: they are loaded where the layouts of both modules are the saved.
"""

from __future__ import annotations

import functools
import os
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from examples.mimo.nemotron_vlm.errors import UserError
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.safe_loading import no_code_from_checkpoints
from megatron.training import checkpointing, training
from megatron.training.utils import print_rank_0

LAYOUT = ("placement", "encoder", "language")
"""Arguments that say which rank holds what."""


@contextmanager
def safe_loading(args: Namespace) -> Iterator[None]:
    """While it lasts, Megatron's loop loads checkpoints so.

    Raises:
        UserError: inside and on every rank, for a checkpoint that is damaged or of another model.
    """
    load = training.load_checkpoint
    training.load_checkpoint = _refusing(load, args)
    try:
        with no_code_from_checkpoints():
            yield
    finally:
        training.load_checkpoint = load


def _refusing(load: Callable, args: Namespace) -> Callable:
    @functools.wraps(load)
    def wrapped(*arguments, **named):
        no_load_rng = args.no_load_rng
        try:
            if not _saved_in_this_layout(args):
                args.no_load_rng = True
                print_rank_0("another layout was saved: random states are not loaded")
            return load(*arguments, **named)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()] or [error]
            raise _refusal(args, causes[0]) from error
        except (CheckpointingException, pickle.UnpicklingError, AssertionError) as error:
            raise _refusal(args, error) from error
        finally:
            args.no_load_rng = no_load_rng

    return wrapped


def _refusal(args: Namespace, error: BaseException) -> UserError:
    reason = " ".join(str(error).split())[:600]
    return UserError(f"--load {args.load}: {reason}")


def _saved_in_this_layout(args: Namespace) -> bool:
    tracker = checkpointing.get_checkpoint_tracker_filename(args.load)
    if not os.path.isfile(tracker):
        return True  # nothing is loaded
    iteration, release = checkpointing.read_metadata(tracker)
    name = checkpointing.get_checkpoint_name(
        args.load, args.ckpt_step or iteration, release, return_base_dir=True
    )
    saved = load_common_state_dict(name).get("args")
    return all(getattr(saved, option, None) == getattr(args, option) for option in LAYOUT)
