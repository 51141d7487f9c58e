# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The iterators over microbatches that Megatron's loop draws from.

Loading processes read ahead, the next microbatch is copied to the device while the one before is
computed, and what the step has waited for all this is counted.
"""

from __future__ import annotations

import signal
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from examples.mimo.nemotron_vlm.data import SampleSource
from examples.mimo.nemotron_vlm.data.reading import Microbatch, Reader
from examples.mimo.nemotron_vlm.data.rows import Packing, Rows
from examples.mimo.nemotron_vlm.data.step_plan import StepPlan, Take
from examples.mimo.nemotron_vlm.defaults import growing_batch
from examples.mimo.nemotron_vlm.encoder_schedule import BUBBLES, encodes_all_at_once
from examples.mimo.nemotron_vlm.errors import UserError
from examples.mimo.nemotron_vlm.layout import Layouts
from examples.mimo.nemotron_vlm.model import ENCODER, IMAGES
from examples.mimo.nemotron_vlm.presets import VLMPreset
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.module_groups import Modules, encoder_part

Step = tuple[int, int, int]
"""Number of a step's first row, its microbatches, and a DP rank's rows of one of them."""


class Loading:
    """What a rank reads, and how.

    Args:
        args: Megatron's and ours.
        layouts: of both modules.
        preset: sizes of the encoder.
        modules: grids and groups of this rank.
        source: of samples.

    waited_s: seconds that steps have waited for data so far.
    """

    def __init__(
        self,
        args: Namespace,
        layouts: Layouts,
        preset: VLMPreset,
        modules: Modules,
        source: SampleSource,
    ) -> None:
        language = modules[LANGUAGE].groups
        self.waited_s = 0.0
        self.args, self.layouts, self._dp = args, layouts, layouts.language.dp
        in_bubbles = args.encoder_schedule == BUBBLES
        self._all_at_once = encodes_all_at_once(layouts.language, in_bubbles)
        self.packing = Packing(args.pack_window, args.sample_multiple) if args.pack else None
        self.plan = StepPlan(
            layouts,
            encoder_part=encoder_part(modules, IMAGES),
            language_dp=language and language.dp.rank(),
            row_cost=partial(row_cost, args.pack) if args.balance else None,
            macro_batch=None if self._all_at_once else args.encoder_macro_batch,
        )
        self.reader = Reader(
            source,
            modality=IMAGES,
            encoder=ENCODER,
            tile=preset.encoder.tile,
            tokens_per_tile=preset.encoder.tokens_per_tile,
            seq_length=args.seq_length,
            packing=self.packing,
            reads_labels=bool(language) and language.pp.rank() == language.pp.size() - 1,
            needs_owners=layouts.language.cp > 1,
        )

    def rows(self, split: str) -> Rows:
        """Rows of a split, from the source as it is now."""
        args = self.args
        return Rows(self.reader.source, split, args.seq_length, self.packing, args.seed)

    def training(self) -> Iterator[Microbatch]:
        """Microbatches from the first row on that the run has not consumed, without end."""
        return self._loaded(self._takes("train", training_steps(self.args, self._dp)))

    def held_out(self) -> Iterator[Microbatch]:
        """Microbatches of the test split; every evaluation reads the same rows."""
        return self._loaded(self._takes("test", held_out_steps(self.args, self._dp)))

    def _takes(self, split: str, steps: Iterator[Step]) -> Iterator[Take]:
        rows = self.rows(split)
        for step in steps:
            yield from self.plan.takes(rows, *step)

    def _reading_ahead(self) -> dict[str, object]:
        """How loading processes work, as a DataLoader takes it."""
        args, language = self.args, self.layouts.language
        count = args.encoder_macro_batch
        if self._all_at_once and not self.layouts.non_colocated:
            # The schedule draws all microbatches of a step when the step begins.
            count = args.global_batch_size // (args.micro_batch_size * language.dp)
        # The signal that makes the run save and end goes to all its processes; these go on.
        ignored = partial(signal.signal, args.exit_signal, signal.SIG_IGN)
        return {
            "prefetch_factor": max(2, -(-count // args.num_workers) + 1),
            "persistent_workers": True,
            "worker_init_fn": (lambda _: ignored()) if args.exit_signal_handler else None,
            "multiprocessing_context": "fork",
        }

    def _loaded(self, takes: Iterator[Take]) -> Iterator[Microbatch]:
        on_gpu = self.args.device == "cuda"
        loader = DataLoader(
            self.reader,
            sampler=takes,
            batch_size=None,
            collate_fn=lambda batch: batch,  # PyTorch's own makes tensors of arrays
            num_workers=self.args.num_workers,
            pin_memory=on_gpu,
            **self._reading_ahead() if self.args.num_workers else {},
        )
        batches = map(received, loader)
        # On a CPU, the runtime has what would be on a GPU.
        on_device = partial(_moved, move=torch.Tensor.cuda)
        batches = _copied_ahead(batches) if on_gpu else map(on_device, batches)
        while True:
            started = time.perf_counter()
            batch = next(batches)
            self.waited_s += time.perf_counter() - started
            yield batch


def data_provider(loading: Loading) -> Callable:
    """What ``pretrain`` takes as its provider of data sets: iterators for training and evaluation.

    Args:
        loading: of this rank; anything with ``training`` and ``held_out``.
    """

    def provider(_sizes, vp_stage: int | None = None):
        return loading.training(), loading.held_out(), None

    provider.is_distributed = True
    return provider


def row_cost(packed: bool, tokens: list[int]) -> float:
    """Cost of a row for the language model, beside what all rows cost alike: its attention.

    Args:
        tokens: of each of the row's samples.
    """
    return float(sum(int(length) ** 2 for length in tokens)) if packed else 0.0


def training_steps(args: Namespace, dp: int) -> Iterator[Step]:
    """All steps from the first row on that the run has not consumed, without end."""
    growing = args.step_batch_size_schedule and growing_batch(args)
    size, micro_size = args.global_batch_size, args.micro_batch_size
    first = args.consumed_train_samples
    while True:
        if growing:
            growing.update(first, consistency_check=False)
            size = growing.get_current_global_batch_size()
        yield first, size // (micro_size * dp), micro_size
        first += size


def held_out_steps(args: Namespace, dp: int) -> Iterator[Step]:
    """The batches of one evaluation after the other; all evaluations read the same rows."""
    size, micro_size = args.eval_global_batch_size, args.eval_micro_batch_size
    while True:
        for number in range(args.eval_iters):
            yield number * size, size // (micro_size * dp), micro_size


def received(batch: Microbatch | str) -> Microbatch:
    """What a `Reader` has read, with tensors in place of its arrays.

    Raises:
        UserError: it says why it could not.
    """
    if isinstance(batch, str):
        raise UserError(f"--data: {batch}", dist.get_rank() if dist.is_initialized() else None)
    if host := batch.get("host_tokens"):
        encoded = {name: list(map(torch.from_numpy, ids)) for name, ids in host.encoded.items()}
        consumed = list(map(torch.from_numpy, host.consumed))
        batch["host_tokens"] = host._replace(encoded=encoded, consumed=consumed)
    return batch


def _copied_ahead(batches: Iterator[Microbatch]) -> Iterator[Microbatch]:
    """Microbatches on this GPU; the next is copied beside the one in use."""
    stream, held = torch.cuda.Stream(), None
    for batch in batches:
        with torch.cuda.stream(stream):
            copied = _moved(batch, lambda tensor: tensor.cuda(non_blocking=True))
            arrived = stream.record_event()
        if held is not None:
            yield _arrived(*held)
        held = copied, arrived


def _arrived(batch: Microbatch, event: torch.cuda.Event) -> Microbatch:
    stream = torch.cuda.current_stream()
    stream.wait_event(event)

    def used(tensor: torch.Tensor) -> torch.Tensor:
        tensor.record_stream(stream)
        return tensor

    return _moved(batch, used)


def _moved(batch: dict, move: Callable[[torch.Tensor], torch.Tensor]) -> dict:
    """The batch with ``move`` done to all tensors but those that the host reads."""

    def moved(value):
        if isinstance(value, dict):
            return _moved(value, move)
        return move(value) if isinstance(value, torch.Tensor) else value

    return {name: moved(value) for name, value in batch.items()}
