# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The iterators over microbatches that Megatron's loop draws from.

Loading processes read ahead, the next microbatch is copied to the device while the current one is
computed, and the time that steps wait for data is counted.
"""

import signal
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import Layouts
from examples.mimo.common.steps import Microbatch, Step, held_out_steps, training_steps
from examples.mimo.nemotron_vlm.data import SampleSource
from examples.mimo.nemotron_vlm.data.loading_processes import read_ahead
from examples.mimo.nemotron_vlm.data.reading import Reader
from examples.mimo.nemotron_vlm.data.rows import Packing, Rows
from examples.mimo.nemotron_vlm.data.step_plan import StepPlan, Take
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from megatron.core.dist_checkpointing.managed_queue import end_with_rank
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.forward.flops import StepWork, note_work
from megatron.core.models.mimo.setup.module_groups import Modules, encoder_part
from megatron.core.pipeline_parallel.utils import is_pp_last_stage


class Loading:
    """A rank's data loading.

    Attribute ``waited_s``: seconds that steps have waited for data so far.
    """

    def __init__(
        self,
        args: Namespace,
        layouts: Layouts,
        preset: VLMPreset,
        modules: Modules,
        source: SampleSource,
        schedule: EncoderSchedule,
    ) -> None:
        language = modules[LANGUAGE].groups
        self.waited_s = 0.0
        self.args, self.layouts, self._dp = args, layouts, layouts.language.dp
        self.packing = Packing(args.pack_window, args.sample_multiple) if args.pack else None
        self.plan = StepPlan(
            layouts,
            preset.encoders,
            encoder_parts={name: encoder_part(modules, name) for name in preset.names},
            language_dp=language and language.dp.rank(),
            width=args.hidden_size,
            balance=args.balance,
            schedule=schedule,
        )
        self.reader = Reader(
            source,
            encoders=preset.encoders,
            token_ids=args.token_ids,
            seq_length=args.seq_length,
            packing=self.packing,
            reads_labels=bool(language) and is_pp_last_stage(language.pp),
            cp=layouts.language.cp,
            sp=layouts.language.tp if layouts.language.sequence_parallel else 1,
        )

    def rows(self, split: str, start: tuple[int, int] = (0, 0)) -> Rows:
        """Return the rows of a split; see `Rows` for the start."""
        args = self.args
        return Rows(self.reader.source, split, args.seq_length, self.packing, args.seed, start)

    def training(self) -> Iterator[Microbatch]:
        """Yield microbatches without end, from the first row that the run has not consumed.

        The count of operations gets the work of each step, and the arguments, which checkpoints
        have, the window of its first row.
        """
        args = self.args
        rows = self.rows("train", args.window_start)
        for batch, work in self._loaded(self._takes(rows, training_steps(args, self._dp))):
            note_work(work)
            if rows.packing:
                args.window_start = rows.window_of(args.consumed_train_samples)
            yield batch

    def held_out(self) -> Iterator[Microbatch]:
        """Yield microbatches of the test split; every evaluation reads the same rows."""
        steps = held_out_steps(self.args, self._dp)
        for batch, _ in self._loaded(self._takes(self.rows("test"), steps)):
            yield batch

    def _takes(self, rows: Rows, steps: Iterator[Step]) -> Iterator[Take]:
        for step in steps:
            yield from self.plan.takes(rows, *step)

    def _reading_ahead(self) -> dict[str, object]:
        """Return the DataLoader's arguments for loading processes."""
        args, language = self.args, self.layouts.language
        count = 1
        if not self.layouts.non_colocated:  # the schedule draws so many at a time
            step = args.global_batch_size // (args.micro_batch_size * language.dp)
            count = self.plan.schedule.at_once(language.pp, step)
        return {
            "prefetch_factor": max(2, -(-count // args.num_workers) + 1),
            "persistent_workers": True,
            "worker_init_fn": self._prepare,
            "multiprocessing_context": "fork",
        }

    def _prepare(self, _number: int) -> None:
        """Let a loading process end with its rank, and not by the signal to save and end.

        One whose rank was killed would wait for ever for room in the pipe to it.
        """
        end_with_rank()
        if self.args.exit_signal_handler:
            signal.signal(self.args.exit_signal, signal.SIG_IGN)

    def _loaded(self, takes: Iterator[Take]) -> Iterator[tuple[Microbatch, StepWork]]:
        on_gpu = self.args.device == "cuda"
        ahead = self._reading_ahead() if self.args.num_workers else {}
        options = {"num_workers": self.args.num_workers, "pin_memory": on_gpu, **ahead}
        batches = read_ahead(self.reader, takes, **options)
        # Without GPUs, the CPU runtime stands in for Tensor.cuda.
        on_device = partial(tree_map_only, torch.Tensor, torch.Tensor.cuda)
        batches = _copied_ahead(batches) if on_gpu else map(on_device, batches)
        while True:
            started = time.perf_counter()
            batch = next(batches)
            if isinstance(batch, str):
                rank = dist.get_rank() if dist.is_initialized() else None
                raise UserError(f"--data: {batch}", rank)
            self.waited_s += time.perf_counter() - started
            yield batch, batch.pop("step_work")


def _copied_ahead(batches: Iterator[Microbatch | str]) -> Iterator[Microbatch | str]:
    """Yield microbatches on this GPU; the next one is copied while one is in use.

    An unreadable one waits for its turn as well, as the run may end before.
    """
    stream, held = torch.cuda.Stream(), None
    copy = partial(torch.Tensor.cuda, non_blocking=True)
    for batch in batches:
        with torch.cuda.stream(stream):
            copied = tree_map_only(torch.Tensor, copy, batch)
            arrived = stream.record_event()
        if held is not None:
            yield _arrived(*held)
        held = copied, arrived
    yield _arrived(*held)


def _arrived(batch: Microbatch | str, event: torch.cuda.Event) -> Microbatch | str:
    stream = torch.cuda.current_stream()
    stream.wait_event(event)
    tree_map_only(torch.Tensor, lambda tensor: tensor.record_stream(stream), batch)
    return batch
