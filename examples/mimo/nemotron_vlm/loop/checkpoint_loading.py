# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Safer loading of Megatron's checkpoints: no code in them runs, and refusals are one line.

Random states belong to one layout: they are loaded only if both modules have the saved layouts.
"""

import pickle
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException

from examples.mimo.common.errors import UserError, one_line
from examples.mimo.common.layout import option_of
from examples.mimo.nemotron_vlm.loop.all_ranks import on_all_ranks
from examples.mimo.nemotron_vlm.loop.checkpoint_saving import Saves
from examples.mimo.nemotron_vlm.loop.resume_rules import (
    check_adapters,
    check_resume,
    check_vocabulary,
)
from examples.mimo.nemotron_vlm.loop.terminal import LAYOUT, beginning, changes, goes_on, say
from examples.mimo.nemotron_vlm.model.adapters import (
    AdaptedModel,
    base_and_counts,
    loading_base,
)
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingException
from megatron.core.dist_checkpointing.parallel_manifest import verify_manifest
from megatron.core.dist_checkpointing.safe_loading import no_code_from_checkpoints
from megatron.core.dist_checkpointing.validation import INTEGRITY_FNAME
from megatron.core.models.mimo.bridge.batch_plan import BatchPlan
from megatron.core.models.mimo.bridge.plan import AtomRows
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.optimizer import MimoOptimizer
from megatron.core.models.mimo.schedule.replaced import replaced
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.rerun_state_machine import Call, Caller
from megatron.training import checkpointing, training

ARRAY = (np.ndarray(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype(np.int64)))
"""Classes and functions that a pickle of an int64 array names."""

torch.serialization.add_safe_globals([Call, Caller, BatchPlan, AtomRows, *ARRAY])
"""Classes that may be unpickled: those of the record that Megatron saves of a non-finite result and
of the plan in its microbatch."""


@contextmanager
def safe_loading(args: Namespace) -> Iterator[None]:
    """Make Megatron's training loop load and save checkpoints this way inside the block.

    Raises:
        UserError: inside the block, if a checkpoint is damaged (on every rank alike) or of another
            model (on the ranks that notice); at its end, if the last save failed.
    """
    saves = Saves(args, training.save_checkpoint_and_time, training.evaluate)
    load = partial(_load, training.load_checkpoint, args, saves)
    with (
        no_code_from_checkpoints(),
        replaced(
            training,
            load_checkpoint=load,
            save_checkpoint_and_time=saves.save,
            evaluate=saves.evaluate,
        ),
        saves.all_made(),
    ):
        yield


def _load(
    load: Callable,
    args: Namespace,
    saves: Saves,
    model: list[MimoModel],
    optimizer: MimoOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    *arguments,
    **named,
) -> tuple[int, int]:
    """Load the checkpoint that the run goes on from; with LoRA, first the base."""
    if args.lora_dim:
        _load_base(load, args, saves, model, optimizer, scheduler, *arguments, **named)
        named["strict"] = False  # the base is there
        if not args.load or _text_of(_tracker(args.load)) is None:
            return 0, 0
    directory, saved = newest(args), None
    set_here = "no_load_rng verify_integrity override_opt_param_scheduler no_save_optim no_save_rng"
    before = {name: getattr(args, name) for name in set_here.split()}
    # Megatron reads only what it would save. Without the rest, the run would end with exit code 0.
    args.no_save_optim = args.no_save_rng = False
    # The scheduler knows this option. Upstream's main would give all modules --lr for it, and count
    # skipped steps as steps of the schedule.
    args.override_opt_param_scheduler = False
    if optimizer:  # there is none with --skip-train
        optimizer.takes_saved_rates = args.use_checkpoint_opt_param_scheduler
    try:
        if directory and not _is_checkpoint(Path(directory)):
            known = ", ".join(map(str, steps_in(Path(directory).parent)))
            raise UserError(
                f"--load {args.load} has no {Path(directory).name}; steps there: {known}"
            )
        if directory and goes_on(args, directory):
            saves.loaded.add(Path(directory).resolve())
            if saves_into(args, args.load):
                saves.best.resume()
        elif directory:
            saves.begun_with = Path(directory).resolve()
        if directory:
            if args.verify_integrity:
                say(f"checking the files of {directory}", args)
                verify_manifest(directory)  # before it is read; Megatron verifies after reading
                args.verify_integrity = False
            saved = load_common_state_dict(directory).get("args")
            check_vocabulary(args, saved, directory)
            check_adapters(args, saved, directory)
            if goes_on(args, directory):
                check_resume(args, saved)
                args.window_start = getattr(saved, "window_start", args.window_start)
            if changes(args, saved, LAYOUT):
                args.no_load_rng = True
        say(beginning(args, directory, saved), args)
        result = load(model, optimizer, scheduler, *arguments, **named)
        if scheduler:
            scheduler.step(0)  # Megatron's scheduler applies the weight decay before loading it
        return result
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()] or [error]
        raise _refusal(args, directory, causes[0], args.rank) from error
    except (CheckpointingException, pickle.UnpicklingError, AssertionError, ValueError) as error:
        raise _refusal(args, directory, error) from error
    finally:
        vars(args).update(before)


def _load_base(
    load: Callable, args: Namespace, saves: Saves, stages: list[AdaptedModel], *rest, **named
) -> None:
    """Load the weights below adapters; without ``--pretrained-checkpoint``, the initial ones stay.
    Collective."""
    if args.pretrained_checkpoint:
        alone = {"load": None, "lora_dim": 0, "finetune": args.finetune, "ckpt_step": None}
        with replaced(args, **alone), loading_base(stages):
            _load(load, args, saves, stages, *rest, **named, strict=False)
    note_base(args, stages)


def note_base(args: Namespace, stages: list[AdaptedModel]) -> None:
    """Note the checksum of the weights below adapters, for checkpoints, and say what is trained.
    Collective."""
    args.lora_base, counts = base_and_counts(stages, args.vocab_size)
    parts = sorted({part for part, _ in counts})
    kinds = "adapted", "trained", "frozen"
    lines = (
        f"{' '.join(filter(None, part))}: "
        + ", ".join(f"{counts[part, kind]:,} {kind}" for kind in kinds if (part, kind) in counts)
        for part in parts
    )
    say(f"LoRA, parameters of each part: {'; '.join(lines)}", args)


def _refusal(
    args: Namespace, directory: str | None, error: BaseException, rank: int | None = None
) -> UserError:
    reason = one_line(error)[:600]
    if "damaged" in reason and (earlier := _earlier(Path(directory or ""))):
        reason += f"; the checkpoint before it: --ckpt-step {earlier}"
    return UserError(f"--load {args.load}: {reason}", rank)


def _earlier(directory: Path) -> int | None:
    """Return the step of the newest checkpoint before a directory's, if there is one."""
    before = directory.name[5:]
    return max(
        (step for step in steps_in(directory.parent) if before.isdigit() and step < int(before)),
        default=None,
    )


def steps_in(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in a directory, in their order."""
    names = [path.name[5:] for path in directory.glob("iter_*") if _is_checkpoint(path)]
    return sorted(int(name) for name in names if name.isdigit())


def _is_checkpoint(directory: Path) -> bool:
    """Return whether a save has come to its end there, or has lost a file since."""
    return any((directory / name).is_file() for name in (CONFIG_FNAME, INTEGRITY_FNAME))


def check_inputs(args: Namespace) -> None:
    """Refuse a folder without a checkpoint, but not one in which this run will save its own."""
    for name in ("load", "pretrained_checkpoint"):
        path = getattr(args, name)
        if path and not saves_into(args, path) and not _tracker(path).is_file():
            raise UserError(f"{option_of(name)} {path}: no checkpoint there")


def saves_into(args: Namespace, folder: str | None) -> bool:
    """Return whether a folder is the one in which the run saves its checkpoints."""
    return bool(folder and args.save) and Path(folder).resolve() == Path(args.save).resolve()


def _tracker(directory: str) -> Path:
    """Return the file that names the newest checkpoint of a folder."""
    return Path(checkpointing.get_checkpoint_tracker_filename(directory))


def _text_of(file: Path) -> str | None:
    """Return a file's text; None if there is none."""
    try:
        return file.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None


def newest(args: Namespace) -> str | None:
    """Return the directory of the checkpoint that Megatron will load, or None if there is none.

    Collective, as Megatron's reading of the tracker is.

    Raises:
        UserError: the tracker names no checkpoint, or only some ranks see it.
    """
    for name in ("load", "pretrained_checkpoint"):
        if not getattr(args, name):
            continue
        tracker = _tracker(getattr(args, name))
        texts, errors = on_all_ranks(partial(_text_of, tracker))
        if errors:
            raise UserError(f"{tracker} cannot be read: {errors[0]}")
        text = texts[0]
        if len({text is None for text in texts}) > 1:
            ranks = ", ".join(str(rank) for rank, text in enumerate(texts) if text is None)
            raise UserError(f"{tracker}: ranks {ranks} do not see it; all must see the same files")
        if text is None:
            continue
        if text != "release" and not text.isdecimal():  # Megatron would end with exit code 0
            known = ", ".join(map(str, steps_in(tracker.parent)))
            raise UserError(f"{tracker} names no step; write one into it that is there: {known}")
        return checkpointing.get_load_checkpoint_path_by_args(args, name)
    return None
