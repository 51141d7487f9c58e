# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""One training run on one rank: the model, its optimizer, and the step."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from examples.mimo.nemotron_vlm import progress
from examples.mimo.nemotron_vlm.agreement import agreed
from examples.mimo.nemotron_vlm.batches import BatchPlan
from examples.mimo.nemotron_vlm.cli import RunConfig
from examples.mimo.nemotron_vlm.data import SampleSource
from examples.mimo.nemotron_vlm.errors import RunFailed
from examples.mimo.nemotron_vlm.freezing import freeze, is_trained
from examples.mimo.nemotron_vlm.grids import encoder_part, make_modules, prepare_megatron
from examples.mimo.nemotron_vlm.initialization import initialize_weights
from examples.mimo.nemotron_vlm.layer_specs import layer_specs
from examples.mimo.nemotron_vlm.loss import summed_loss
from examples.mimo.nemotron_vlm.model import ModuleGroups, build_vlm
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.mimo.colocated_schedule import colocated_forward_backward_with_pp
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.config.role import ModuleLayout
from megatron.core.models.mimo.encoding import with_embeddings
from megatron.core.models.mimo.grad_finalization import (
    ddp_modules,
    finalize_mimo_grads,
    global_token_count,
    no_grad_sync,
)
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.non_colocated_schedule import (
    destroy_bridges,
    encoders_to_language,
    finalize_non_colocated_grads,
    language_total,
    non_colocated_forward_backward,
    own_groups,
)
from megatron.core.models.mimo.optimizer import get_mimo_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Trainer:
    """Model, optimizer and schedule of a run.

    Args:
        config: the run.
        source: of the samples.
    """

    def __init__(self, config: RunConfig, source: SampleSource) -> None:
        self.config = config
        self.source = source
        self.step = 0
        self.skipped = self._skipped_in_a_row = 0
        self.modules = make_modules(config.layouts, BACKENDS[config.device])
        prepare_megatron(self.modules, config.seed)
        self.device = torch.device(
            "cpu" if config.device == "cpu" else f"cuda:{torch.cuda.current_device()}"
        )
        self.plan = BatchPlan(
            config.layouts,
            encoder_part=encoder_part(self.modules),
            language_dp=self.language_groups and self.language_groups.dp.rank(),
            tokens_per_tile=config.preset.encoder.tokens_per_tile,
        )
        self.stages = [stage.to(self.device) for stage in build_model(config, self.modules)]
        for stage in self.stages:
            initialize_weights(stage, config.seed)
        freeze(self.stages, config.freeze)
        wrap_in_ddp(self.stages)
        self.communicator = None
        if config.layouts.non_colocated:
            self.communicator = encoders_to_language(self.stages[0])
        self.optimizer = get_mimo_optimizer(self.stages, _optimizer_config(config))
        self.scheduler = _scheduler(config, self.optimizer)

    @property
    def language_groups(self):
        """Process groups of the language model; None on ranks without it."""
        return self.modules[LANGUAGE].groups

    def run_schedule(self, forward_step, split: str, step: int, forward_only: bool) -> list:
        """Forward (and backward) over one step's microbatches.

        Returns:
            What the loss function reported of each.

        Raises:
            UserError: on every rank, for bad samples on any; nothing has run by then.
        """
        progress.note(f"step {step + 1} ({split}), reading samples")
        microbatches = agreed(lambda: self.plan.microbatches(self.source, split, step, self.device))
        return self._schedule()(
            forward_step_func=_noting(forward_step, f"step {step + 1} ({split})"),
            data_iterator=iter(microbatches),
            model=self.stages,
            num_microbatches=self.config.layouts.num_microbatches,
            seq_length=self.config.layouts.batch.seq_length,
            micro_batch_size=self.config.layouts.batch.micro_size,
            forward_only=forward_only,
        )

    def _schedule(self) -> Callable[..., list]:
        if self.config.layouts.non_colocated:
            groups = {name: module.groups for name, module in self.modules.items()}
            return partial(
                non_colocated_forward_backward, communicator=self.communicator, groups=groups
            )
        if self.config.layouts.language.pp > 1:
            return partial(
                colocated_forward_backward_with_pp,
                recompute_encoder_shares=self.config.recompute_encoder or None,
                pg_collection=self.language_groups,
            )
        return partial(forward_backward_no_pipelining, pg_collection=self.language_groups)

    def train_step(self) -> dict[str, float | int | bool | None]:
        """One optimizer step; returns its record for the metrics file.

        A step with gradients that are not finite is skipped: all ranks keep weights and state.

        Raises:
            RunFailed: on every rank, after too many skipped steps in a row.
        """
        started = time.perf_counter()
        for stage in self.stages:
            stage.train()
        for module in itertools.chain(*ddp_modules(self.stages)):
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        biases = self._expert_biases()
        before = [bias.clone() for bias in biases]
        reports = self.run_schedule(_forward_step, "train", self.step, forward_only=False)
        progress.note(f"step {self.step + 1} (train), optimizer")
        lr = self.scheduler.get_lr({"max_lr": self.config.lr, "min_lr": self.config.min_lr})
        stepped, grad_norm, _ = self.optimizer.step()
        self.step += 1
        self._count_skipped(stepped)
        if stepped:
            self.scheduler.step(1)
        else:
            for bias, kept in zip(biases, before, strict=True):
                bias.copy_(kept)  # the schedule updates it, by the loads of the experts
        loss, tokens = self.total(reports, 2)
        loss /= max(tokens, 1)
        return {
            "step": self.step,
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": grad_norm,
            "num_tokens": int(tokens),
            "lr": lr,
            "step_time_s": time.perf_counter() - started,
            "skipped": not stepped,
            "skipped_steps": self.skipped,
        }

    def _expert_biases(self) -> list[torch.Tensor]:
        modules = itertools.chain(*(stage.modules() for stage in self.stages))
        found = (getattr(module, "expert_bias", None) for module in modules)
        return [bias for bias in found if bias is not None]

    def _count_skipped(self, stepped: bool) -> None:
        self.skipped += not stepped
        self._skipped_in_a_row = 0 if stepped else self._skipped_in_a_row + 1
        if self._skipped_in_a_row > self.config.max_skipped_steps:
            raise RunFailed(
                f"{self._skipped_in_a_row} steps in a row up to step {self.step} had gradients "
                f"that are not finite, more than --max-skipped-steps "
                f"{self.config.max_skipped_steps}; lower --lr or look at the data"
            )

    def total(self, reports: list[torch.Tensor], size: int) -> list[float]:
        """Sum reports [size] over microbatches and over all ranks that saw other tokens."""
        local = torch.zeros(size, dtype=torch.float64, device=self.device)
        for report in reports:
            local += report
        if self.config.layouts.non_colocated:
            groups = own_groups({name: module.groups for name, module in self.modules.items()})
            return language_total(local, self.stages[0], groups).tolist()
        return global_token_count(local, self.language_groups).tolist()

    def destroy(self) -> None:
        """Free the model and every process group of the run; the default group stays.

        Collective over all ranks: none closes a group that another still uses. Experts' dispatchers
        keep the last forward's graph, and with it the groups, out of the garbage collector's sight.
        """
        dist.barrier()
        for stage in self.stages:
            stage.destroy()
            for module in stage.modules():
                if hasattr(module, "token_dispatcher"):
                    module.token_dispatcher = None
        for module in self.modules.values():
            module.grid.destroy()
        destroy_bridges()
        self.communicator = None
        del stage, module, self.stages, self.optimizer, self.scheduler, self.modules
        gc.collect()  # a model is a cycle of references, which keeps its groups' threads alive


def _noting(forward_step: Callable, where: str) -> Callable:
    """The forward step, telling the fault watch which microbatch it is at."""
    numbers = itertools.count()

    def noted(microbatches, model):
        progress.note(f"{where}, microbatch {next(numbers)}")
        return forward_step(microbatches, model)

    return noted


def build_model(config: RunConfig, modules: dict[str, ModuleGroups]) -> list[MimoModel]:
    """The run's bare model on this rank, by virtual stage; its weights are not initialized."""
    specs = layer_specs(config.transformer_impl)
    return build_vlm(config.preset, config.layouts, modules, specs, DTYPES[config.precision])


def _forward_step(microbatches, model: MimoModel):
    output, loss_mask = model(**with_embeddings(model, next(microbatches)))
    return output, partial(summed_loss, loss_mask=loss_mask)


def wrap_in_ddp(stages: list[MimoModel]) -> None:
    """Wrap what is trained in DDP over its own groups, and tell the schedule how to reduce it."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True
    )

    def wrapped(module, config):
        if not is_trained(module):
            return module
        return DistributedDataParallel(
            config, ddp_config, module, pg_collection=module.pg_collection
        )

    for stage in stages:
        for name, module in stage.modality_submodules.items():
            (encoder,) = module.encoders.values()
            stage.modality_submodules[name] = wrapped(module, encoder.config)
        if stage.language_model is not None:
            stage.language_model = wrapped(stage.language_model, stage.config)
        non_colocated = stage.role.mode is ModuleLayout.NON_COLOCATED
        stage.config.finalize_model_grads_func = (
            finalize_non_colocated_grads if non_colocated else finalize_mimo_grads
        )
        stage.config.no_sync_func = partial(no_grad_sync, stages)


def _optimizer_config(config: RunConfig) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta2=0.95,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=config.precision == "bf16",
        params_dtype=DTYPES[config.precision],
        use_distributed_optimizer=True,
    )


def _scheduler(config: RunConfig, optimizer) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.steps,
        lr_decay_style="cosine",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=config.steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,  # a run may go on with other rates and steps
        override_opt_param_scheduler=True,
    )
