# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Train the model of mimo_gpt.py with Megatron, and on one rank in plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.mimo.bridge.batch_plan import BatchPlan
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
from megatron.core.token_layout import pad_lengths
from tests.unit_tests.models.mimo.mimo_gpt import IMAGES, TOKEN_IDS, Module, build
from tests.unit_tests.models.mimo.mimo_gpt_samples import Sample, batch
from tests.unit_tests.models.mimo.sample_plan import plan_of
from tests.unit_tests.test_utilities import Utils

ADAM = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)

Steps = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


@dataclass(frozen=True)
class Job:
    """A model and its batch to train, whatever the layout.

    Args:
        samples: the same in every step, so that the loss has to fall.
        microbatches: number that the batch is cut into.
        packed: whether the samples of a microbatch lie end to end in one row.
        tied: whether the output layer has the embeddings' weight.
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
    tied: bool = False
    frozen: tuple[str, ...] = ()
    overlap: bool = False
    per_token: bool = True
    macro_batch: int = 1
    in_bubbles: bool = False

    def on_one_rank(self) -> Job:
        """The job that gives the same numbers on one rank."""
        return Job(self.samples, packed=self.packed, tied=self.tied, frozen=self.frozen)

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
        stages = build(modules, self.tied, self.schedule)
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

    def plan(number: int) -> BatchPlan:
        total = at_once_with(number)

        def within(name: str) -> range:
            own = part(name, number)
            return range(own.start - total.start, own.stop - total.start)

        ids = [sample.ids.numpy() for sample in samples(total)]
        padded = [pad_lengths((len(tokens),), language.groups.cp.size()).total for tokens in ids]
        topologies = {n: bridge_topology(modules[n].grid, language.grid) for n in job.modalities}
        encoded = {name: within(name) for name in job.modalities}
        return plan_of(ids, padded, TOKEN_IDS, topologies, encoded, within(LANGUAGE))

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
