# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A run's metrics beside Megatron's log: a JSON line per step, and progress; from the last rank."""

import contextlib
import functools
import gc
import json
import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from examples.mimo.nemotron_vlm.data.provider import Loading
from examples.mimo.nemotron_vlm.loop.forward_step import LOSS, OF_MODALITY, SCORES, TOKENS
from examples.mimo.nemotron_vlm.loop.terminal import tell
from megatron.core.models.mimo.schedule.replaced import replaced
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.training import training
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from megatron.training.training import num_floating_point_operations

SHOWN = {"loss": "loss", "eval_accuracy": "accuracy", "tokens_per_s": "tokens/s"}
SHOWN |= {"tflops": "TFLOP/s", "memory_gib": "GiB", "data_wait_s": "data wait s"}
"""Metrics in lines of progress, with the names that they have there; of a GPU or rank."""

ON_BAR = ("loss", "accuracy", "tokens/s")
"""Those on the progress bar, which fits 80 columns; an accuracy stays until the next."""

BAR = {"bar_format": "{n_fmt}/{total_fmt} |{bar}| {desc}, {remaining} left", "desc": "starting"}
BAR |= {"disable": None, "mininterval": 1, "dynamic_ncols": True}
"""The progress bar, as tqdm takes it; there is none without a terminal."""

IN_BOARDS = ("tokens_per_s", "tflops", "memory_gib", "data_wait_s", "pause_s")
"""Metrics that Megatron does not write to TensorBoard and W&B."""

LINE_INTERVAL_S = 60
"""Seconds between lines of progress in the log, and where there is no terminal; the last step has a
line, too."""

Record = dict[str, float | int | bool | None]


@contextmanager
def observed(
    args: Namespace, loading: Loading, note: Callable[[Record], object] | None = None
) -> Iterator[None]:
    """Watch Megatron's training loop inside the block, and report its steps.

    A step is reported when the next one ends, before a checkpoint that includes it is saved, or at
    the end of the run. Until then its numbers are copied from the device without the host waiting.

    Args:
        note: called with each record, on the last rank, which has the loss.
    """
    with contextlib.ExitStack() as stack:
        if args.device == "cuda":
            stack.callback(gc.unfreeze)
            stack.enter_context(replaced(training, train_step=_first_kept(training.train_step)))
        if args.rank == args.world_size - 1:
            watch = stack.enter_context(closing(_Watch(args, loading, note)))
            watched = replaced(
                training,
                train_step=watch.train_step,
                evaluate=watch.evaluate,
                save_checkpoint_and_time=watch.save_checkpoint,
            )
            stack.enter_context(watched)
        yield


def _first_kept(train_step: Callable) -> Callable:
    """Wrap ``train_step``: the garbage collector leaves alone what there is after the first one. It
    would look through a million objects again and again, for a second, with an idle GPU."""
    is_kept = False

    @functools.wraps(train_step)
    def wrapped(*arguments, **named):
        nonlocal is_kept
        result = train_step(*arguments, **named)
        if not is_kept:
            gc.collect()
            gc.freeze()
            is_kept = True
        return result

    return wrapped


class _OnTheWay:
    """Scalars copied asynchronously from the device to the host."""

    def __init__(self, scalars: dict[str, Tensor]) -> None:
        self._names, self._arrived = list(scalars), torch.cuda.Event()
        self._host = torch.empty(len(scalars), dtype=torch.float64, pin_memory=True)
        if scalars:
            self._host.copy_(torch.stack(list(scalars.values())), non_blocking=True)
        self._arrived.record()

    def read(self) -> dict[str, float]:
        """Wait for the numbers, and return them by name."""
        self._arrived.synchronize()
        return dict(zip(self._names, self._host.numpy().tolist(), strict=True))


class _Watch:
    """Calls Megatron's functions, makes records from the calls, and hands them to a writer."""

    def __init__(
        self, args: Namespace, loading: Loading, note: Callable[[Record], object] | None
    ) -> None:
        self._args, self._loading, self._note = args, loading, note
        self._train_step, self._evaluate = training.train_step, training.evaluate
        self._save_checkpoint = training.save_checkpoint_and_time
        self._writer = MetricsWriter(args.metrics_out)
        self._held: Record | None = None
        self._reported = _OnTheWay({})
        self._idle_since: float | None = None

    def train_step(self, step, data, model, optimizer, *rest, **named) -> object:
        if self._idle_since is None:
            # Megatron computes it from --train-samples after this object was made.
            self._writer.total_steps = self._args.train_iters
            tell("taking the first step, which takes longest")
        started, waited = time.perf_counter(), self._loading.waited_s
        # Before the step: afterwards, the optimizer has the next step's rate.
        lr = get_canonical_lr_for_logging(optimizer.param_groups)
        result = self._train_step(step, data, model, optimizer, *rest, **named)
        ended = time.perf_counter()
        self._write_held()  # before the step's own log: W&B takes no number of an earlier step
        losses, skipped, asks_save, ends, _, grad_norm, *_ = result
        if not (asks_save or ends):  # else the step does not count
            samples, seconds = get_current_global_batch_size(), ended - started
            of_one = 1 / (seconds * self._args.world_size)
            self._reported = _OnTheWay(losses)
            self._held = {
                "step": self._args.curr_iteration + 1,
                "loss": None,
                "grad_norm": _finite(grad_norm),
                "num_tokens": 0,
                "lr": lr,
                "step_time_s": seconds,
                "pause_s": started - (self._idle_since or started),
                "data_wait_s": self._loading.waited_s - waited,
                "tokens_per_s": samples * self._args.seq_length * of_one,
                "tflops": num_floating_point_operations(self._args, samples) * of_one / 1e12,
                "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
                "skipped": bool(skipped),
            }
        self._idle_since = ended
        return result

    def evaluate(self, *arguments, **named) -> tuple:
        started = time.perf_counter()
        result = self._evaluate(*arguments, **named)
        if self._idle_since:
            self._idle_since += time.perf_counter() - started
        found = {name: float(value) for name, value in (result[0] or {}).items()}
        scores = {name: _finite(found[key]) for name, key in SCORES.items() if LOSS in found}
        if self._held is not None:
            self._held |= scores
        elif scores:  # of no step, as with --skip-train
            tell(", ".join(f"{name.replace('_', ' ')} {score}" for name, score in scores.items()))
        return result

    def save_checkpoint(self, *arguments, **named) -> object:
        # A run resumed from the checkpoint needs the step; an evaluation may still follow.
        if self._held is not None:
            self._writer.write(self._completed())
        return self._save_checkpoint(*arguments, **named)

    def close(self) -> None:
        self._write_held()
        self._writer.close()

    def _write_held(self) -> None:
        if self._held is None:
            return
        record, self._held = self._completed(), None
        self._writer.write(record)
        if self._note:
            self._note(record)
        if record["step"] % self._args.tensorboard_log_interval:  # for both boards, as in Megatron
            return
        numbers = {name: record[name] for name in IN_BOARDS if name in record}
        if board := get_tensorboard_writer():
            for name, number in numbers.items():
                board.add_scalar(name, number, record["step"])
        if (wandb := get_wandb_writer()) and wandb.run:  # Megatron has ended it before the last
            wandb.log(numbers, record["step"])

    def _completed(self) -> Record:
        """Return the held record, completed with the numbers from the device."""
        reported = self._reported.read()
        self._held["loss"] = _finite(reported.get(LOSS))
        self._held["num_tokens"] = round(reported.get(TOKENS, 0.0))
        for name in (name for name in reported if name.startswith(OF_MODALITY)):
            if loss := _finite(reported[name]):
                self._held[f"loss_{name.removeprefix(OF_MODALITY)}"] = loss
        return self._held


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class MetricsWriter:
    """Writes records as they come.

    Args:
        path: file of JSON lines; a resumed run keeps the records of the steps before it. None shows
            only progress, as a bar on a terminal, else as lines.
        total_steps: steps of the whole run.
    """

    def __init__(self, path: Path | None, total_steps: int | None = None) -> None:
        self._path, self.total_steps = path, total_steps
        self._file = self._bar = None
        self._step = self._begin = self._skipped = 0
        self._lines: list[bytes] = []
        self._on_bar: dict[str, str] = {}
        self._is_whole = True
        self._last_line = time.monotonic()

    def write(self, record: Record) -> None:
        """Append one step's record; its `step` counts from 1.

        A second record of a step replaces the first. The first record of all shows where a resumed
        run continues: the file's records from that step on are dropped. None stands for a number
        that is not finite.
        """
        step = record["step"]
        if self._bar is None:
            self._file = self._path and _reopen(self._path, step - 1)
            self._bar = tqdm(total=self.total_steps, initial=step - 1, **BAR)
        is_new, self._step = step != self._step, step
        if self._file:
            self._append(json.dumps(record).encode() + b"\n", is_new)
        shown = numbers_of(record)
        latest = self._on_bar | shown
        self._on_bar = {name: latest[name] for name in ON_BAR if name in latest}
        self._bar.set_description_str(_listed(self._on_bar), refresh=False)
        self._bar.update(is_new)
        self._skipped += is_new and record.get("skipped", False)
        if self._skipped:
            shown["skipped steps"] = str(self._skipped)
        now = time.monotonic()
        is_due = step == self.total_steps or now - self._last_line >= LINE_INTERVAL_S
        if is_new and is_due:
            self._last_line = now
            tell(f"step {step} of {self.total_steps}: {_listed(shown)}", self._bar.disable)

    def _append(self, line: bytes, is_new: bool) -> None:
        """Write a line, with those before it that a full disk has not taken."""
        if is_new and self._is_whole:
            self._begin, self._lines = self._file.tell(), []
        self._lines = [*(self._lines if is_new else self._lines[:-1]), line]
        self._is_whole, text = False, b"".join(self._lines)
        with contextlib.suppress(OSError):
            self._file.seek(self._begin)
            self._file.truncate()
            self._is_whole = self._file.write(text) == len(text)

    def close(self) -> None:
        """Close the file and the bar."""
        if self._bar is not None:
            self._bar.close()
        if self._file:
            self._file.close()


def numbers_of(record: Record) -> dict[str, str]:
    """Return what people read of a record: numbers by name."""
    found = {name: record.get(key) for key, name in SHOWN.items()}
    losses = {key.replace("_", " "): record[key] for key in record if key.startswith("loss_")}
    found |= losses if len(losses) > 1 else {}  # the loss of one modality is the whole
    return {name: _short(value) for name, value in found.items() if value is not None}


def _listed(numbers: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


def _short(value: float) -> str:
    """Return three digits of a number, and all digits before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def read_metrics(path: Path) -> list[Record]:
    """Read the records of a file, if there is one, without a last line that a kill cut short."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _reopen(path: Path, steps_before: int) -> FileIO:
    """Keep only the records of the steps before in the file, and return it open, without buffer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [r for r in read_metrics(path) if r["step"] <= steps_before] if steps_before else []
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
    file = partial.open("ab", buffering=0)
    partial.replace(path)
    return file
