# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Random samples for the model of mimo_gpt.py, and its training: with Megatron, and on one rank in
plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.mimo.bridge.batch_plan import BatchPlan
from megatron.core.models.mimo.bridge.plan import AtomRows
from megatron.core.models.mimo.bridge.topology import bridge_topology
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.forward.encoding import run_microbatch
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.schedule.encoder_work import prepare_bubbles
from megatron.core.models.mimo.schedule.grad_finalization import global_token_count
from megatron.core.models.mimo.setup.data_parallel import prepare_for_training
from megatron.core.models.mimo.setup.module_groups import encoder_part, schedule_collection
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.token_layout import PaddedLengths, pad_lengths, zigzag_owners
from tests.unit_tests.models.mimo.mimo_gpt import (
    IMAGES,
    PIXELS,
    TOKEN_IDS,
    TOKENS,
    Module,
    build,
)
from tests.unit_tests.test_utilities import Utils

ADAM = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)

TEXT_IDS = min(TOKEN_IDS.values())


@dataclass(frozen=True, eq=False)
class Sample:
    """Token ids, labels and loss mask ``[length]``; per modality, patches ``[n, PIXELS]``."""

    ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    patches: dict[str, torch.Tensor]


def draw(patches: dict[str, int], seed: int, length: int = TOKENS) -> Sample:
    """Draw a sample with so many patches of each modality, at random places of the text."""
    rng = torch.Generator().manual_seed(seed)
    text = torch.randint(TEXT_IDS, (length + 1,), generator=rng)
    ids = text[:-1].clone()
    free = torch.randperm(length, generator=rng).tolist()
    for name, count in patches.items():
        ids[[free.pop() for _ in range(count)]] = TOKEN_IDS[name]
    return Sample(
        ids=ids,
        labels=text[1:],
        loss_mask=(torch.rand(length, generator=rng) < 0.6).float(),
        patches={n: torch.randn(count, PIXELS, generator=rng) for n, count in patches.items()},
    )


def batch(
    encoded: dict[str, Sequence[Sample]],
    read: Sequence[Sample],
    packed: bool,
    plan: BatchPlan | None = None,
) -> dict[str, object]:
    """MimoModel's keyword arguments.

    Args:
        encoded: per modality, the samples whose patches its encoder takes on this rank.
        read: the samples that the language model takes; of one length, unless packed.
        packed: lay them end to end, as one row.
        plan: brought along, if any.
    """
    join = (lambda parts: torch.cat(parts)[None]) if packed else torch.stack
    lengths = [len(sample.ids) for sample in read]
    bounds = torch.tensor([0, *lengths], device=Utils.device).cumsum(0)
    packing = {
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "max_seqlen_q": max(lengths),
        "max_seqlen_kv": max(lengths),
    }

    def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
        return join(tensors).to(Utils.device)

    inputs = {}
    for name, samples in encoded.items():
        patches = [s.patches[name] for s in samples if len(s.patches[name])]
        hidden = {"hidden_states": torch.cat(patches).to(Utils.device)} if patches else None
        inputs[name] = {"patches": hidden} if patches else None
    return ({"batch_plan": plan} if plan else {}) | {
        "input_ids": joined([s.ids for s in read]),
        "position_ids": joined([torch.arange(length) for length in lengths]),
        "labels": joined([s.labels for s in read]),
        "loss_mask": joined([s.loss_mask for s in read]),
        "modality_inputs": inputs,
        "packing_kwargs": packing if packed else None,
    }


Steps = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


@dataclass(frozen=True)
class Job:
    """A model and its batch to train, whatever the layout.

    Args:
        samples: the same in every step, so that the loss has to fall.
        microbatches: number that the batch is cut into.
        packed: whether the samples of a microbatch lie end to end in one row.
        frozen: modules that are not trained.
        overlap: whether gradients are reduced during the backward.
        per_token: whether the loss is that of all tokens, or the mean of the ranks' means.
        macro_batch: microbatches that are encoded at once where there is no pipeline, or in its
            bubbles.
        in_bubbles: whether a pipeline's bubbles have the encoders' work.
    """

    samples: tuple[Sample, ...]
    microbatches: int = 2
    packed: bool = False
    frozen: tuple[str, ...] = ()
    overlap: bool = False
    per_token: bool = True
    macro_batch: int = 1
    in_bubbles: bool = False

    def on_one_rank(self) -> Job:
        """The job that gives the same numbers on one rank."""
        return Job(self.samples, packed=self.packed, frozen=self.frozen)

    @property
    def schedule(self) -> EncoderSchedule:
        """When the encoders run."""
        return EncoderSchedule(self.macro_batch, self.in_bubbles)

    @property
    def modalities(self) -> list[str]:
        """Names of the modalities."""
        return list(self.samples[0].patches)

    def model(self, modules: dict[str, Module]) -> list[MimoModel]:
        """Build the model on this rank, without anything yet that trains it."""
        stages = build(modules, self.schedule)
        for name, stage in itertools.product(self.frozen, stages):
            if name == LANGUAGE:
                stage.language_model.requires_grad_(False)
            elif name in stage.modality_submodules:
                stage.modality_submodules[name].requires_grad_(False)
        return stages


def _share(places: range, number: int, count: int) -> range:
    """Part ``number`` of ``count``, as even as can be."""
    first, end = (len(places) * i // count for i in (number, number + 1))
    return places[first:end]


def _batches(job: Job, modules: dict[str, Module], planned: bool) -> list[dict[str, object]]:
    """This rank's microbatches: consecutive samples of each macro-batch (of all, in a pipeline)."""

    language = modules[LANGUAGE]
    at_once = job.schedule.at_once(language.groups.pp.size(), job.microbatches)

    def at_once_with(number: int) -> range:
        everything = range(len(job.samples))
        return _share(everything, number // at_once, job.microbatches // at_once)

    def part(name: str, number: int) -> range:
        dp = modules[name].groups.dp
        index = dp.rank() if name == LANGUAGE else encoder_part(modules, name)
        return _share(_share(at_once_with(number), index, dp.size()), number % at_once, at_once)

    def rows(name: str, number: int, encoded: bool) -> AtomRows:
        topology, total = bridge_topology(modules[name].grid, language.grid), at_once_with(number)
        atoms = (topology.encodes if encoded else topology.consumes)(Utils.rank)
        places = part(name if encoded else LANGUAGE, number)
        is_row = [sample.ids.numpy() == TOKEN_IDS[name] for sample in samples(places)]
        atom = (np.array(places, dtype=int) - total.start) * topology.atoms // len(total)
        counts = np.bincount(atom - atoms.start, [row.sum() for row in is_row], len(atoms))
        padded = tuple(pad_lengths((len(row),), topology.dest_cp).total for row in is_row)
        lengths = PaddedLengths(tuple(map(len, is_row)), padded)
        owners = zigzag_owners(lengths, topology.dest_cp)
        owners = owners[np.concatenate([np.empty(0, bool), *is_row])]
        return AtomRows(counts.astype(int), owners if topology.dest_cp > 1 else None)

    def plan(number: int) -> BatchPlan:
        return BatchPlan(
            {name: rows(name, number, encoded=True) for name in job.modalities},
            {name: rows(name, number, encoded=False) for name in job.modalities},
            tuple(len(sample.ids) for sample in samples(part(LANGUAGE, number))),
        )

    def samples(places: range) -> Sequence[Sample]:
        return job.samples[places.start : places.stop]

    return [
        batch(
            {name: samples(part(name, number)) for name in job.modalities},
            samples(part(LANGUAGE, number)),
            job.packed,
            plan(number) if planned else None,
        )
        for number in range(job.microbatches)
    ]


def _loss(output: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total, tokens = (output * loss_mask).sum(), loss_mask.sum()
    return total, tokens.int(), torch.stack([total.detach(), tokens])


def _forward_step(batches, model: MimoModel):
    output, loss_mask = run_microbatch(model, next(batches))
    return output, partial(_loss, loss_mask=loss_mask)


def _prepare(job: Job, stages: list[MimoModel], modules: dict[str, Module]) -> None:
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=job.overlap
    )
    for stage in stages:
        encoders = [e for m in stage.modality_submodules.values() for e in m.encoders.values()]
        for part in (stage, *encoders):
            part.config.calculate_per_token_loss = job.per_token
    prepare_for_training(stages, modules, ddp_config)
    if job.in_bubbles:
        prepare_bubbles(stages)


def _forward_backward(
    stages: list[MimoModel], modules: dict[str, Module], batches: list[dict[str, object]]
) -> list[torch.Tensor]:
    """Run Megatron's schedule; returns the reports of the last stage's microbatches."""
    collection = schedule_collection(modules)
    batch_size, seq_length = batches[0]["input_ids"].shape
    return get_forward_backward_func(schedule_pg_collection=collection)(
        forward_step_func=_forward_step,
        data_iterator=iter(batches),
        model=stages,
        num_microbatches=len(batches),
        seq_length=seq_length,
        micro_batch_size=batch_size,
        forward_only=False,
        pg_collection=collection,
    )


def train(
    job: Job,
    modules: dict[str, Module],
    steps: int,
    planned: bool = True,
    around: Callable[[int], AbstractContextManager] = lambda _: nullcontext(),
) -> Steps:
    """Train with Megatron's schedules, DDP and distributed optimizer.

    Args:
        planned: whether microbatches bring a plan; without it all samples have as many patches.
        around: makes the context in which a step's forward and backward run.
    """
    stages = job.model(modules)
    _prepare(job, stages, modules)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=ADAM["lr"],
            adam_beta1=ADAM["betas"][0],
            adam_beta2=ADAM["betas"][1],
            adam_eps=ADAM["eps"],
            weight_decay=ADAM["weight_decay"],
            clip_grad=0.0,
            use_distributed_optimizer=True,
        ),
        stages,
    )
    found = []
    for step in range(steps):
        for stage in stages:
            stage.zero_grad_buffer()
        optimizer.zero_grad()
        batches = _batches(job, modules, planned)
        with around(step):
            reports = _forward_backward(stages, modules, batches)
        _, grad_norm, _ = optimizer.step()
        local = sum(reports, torch.zeros(2, device=Utils.device))
        total, tokens = global_token_count(local, modules[LANGUAGE].groups).tolist()
        found.append((total / tokens, grad_norm))
    for stage in stages:
        stage.destroy()
    return found


def encoder_gradients(job: Job, modules: dict[str, Module]) -> dict[str, torch.Tensor]:
    """Gradients of the images' encoder after one batch, by name, of this rank alone: no DDP."""
    stages = job.model(modules)
    batches = _batches(job, modules, planned=True)
    for inputs in (microbatch["modality_inputs"][IMAGES] for microbatch in batches):
        if inputs:
            patches = inputs["patches"]
            patches["hidden_states"] = patches["hidden_states"].to(modules[IMAGES].dtype)
    _forward_backward(stages, modules, batches)
    encoder = stages[0].modality_submodules[IMAGES]
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in encoder.named_parameters()
    }
    for stage in stages:
        stage.destroy()
    return gradients


def train_plainly(job: Job, modules: dict[str, Module], steps: int) -> Steps:
    """Train the same in plain PyTorch on one rank: mean loss of all tokens, backward, Adam."""
    (model,) = job.model(modules)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, **ADAM)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = [model(**microbatch) for microbatch in _batches(job, modules, planned=False)]
        tokens = sum(loss_mask.sum() for _, loss_mask in outputs)
        loss = sum((output * loss_mask).sum() for output, loss_mask in outputs) / tokens
        loss.backward()
        norms = [p.grad.norm() for p in trained if p.grad is not None]
        optimizer.step()
        found.append((loss.item(), torch.stack(norms).norm().item()))
    return found
