# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The model builder that ``pretrain`` calls."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from examples.mimo.nemotron_vlm.loop.all_ranks import on_all_ranks
from examples.mimo.nemotron_vlm.loop.checkpoint_loading import note_base
from examples.mimo.nemotron_vlm.loop.terminal import say
from examples.mimo.nemotron_vlm.model.model import build_vlm, initial_draws
from examples.mimo.nemotron_vlm.model.part_settings import freeze
from examples.mimo.nemotron_vlm.options.run import Run
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.setup.data_parallel import prepare_for_training
from megatron.core.models.mimo.setup.initialization import initialize_weights
from megatron.core.models.mimo.setup.module_groups import Modules, prepare_process
from megatron.core.transformer.moe.grouped_experts import lay_out_frozen_experts
from megatron.training.models.base import ModelBuilder, ModelConfig, compose_hooks


@dataclass(kw_only=True)
class VLMBuildConfig(ModelConfig):
    """The builder's inputs; Megatron does not serialize fields that begin with an underscore."""

    builder: ClassVar[str] = "examples.mimo.nemotron_vlm.loop.builder.VLMBuilder"
    _run: Run
    _modules: Modules


class VLMBuilder(ModelBuilder[MimoModel, VLMBuildConfig]):
    """Builds the Nemotron VLM on this rank."""

    def build_model(self, pg_collection, pre_process=None, post_process=None, vp_stage=None):
        """Return the bare model's virtual stage ``vp_stage``; the other arguments are ignored."""
        return self._build()[vp_stage or 0]

    def build_distributed_models(
        self,
        pg_collection,
        ddp_config: DistributedDataParallelConfig | None = None,
        wrap_with_ddp: bool = True,
        **_,
    ) -> list[MimoModel]:
        """Build this rank's virtual stages of the model, initialized and ready to train.

        Args:
            pg_collection: ignored: each module has the groups of its own grid.
            wrap_with_ddp: whether the run trains; otherwise no parameter requires a gradient.
        """
        run, modules = self._model_config._run, self._model_config._modules
        args = run.args
        prepare_process(modules, args)
        say("building the model", args)
        stages = [stage.cuda(torch.cuda.current_device()) for stage in self._build()]
        if run.adapters:
            words = on_all_ranks(lambda: [word for stage in stages for word in stage.words])[0]
            run.adapters.check(set().union(*words))
        own = initial_draws(run.preset)
        say("drawing its first weights", args)
        for stage in stages:
            initialize_weights(stage, args.seed, args.language_std, own)
        stages = compose_hooks(self._model_config.pre_wrap_hooks)(stages)
        freeze(stages, run.parts.frozen)
        if run.adapters:
            for stage in stages:
                stage.save_trained(run.parts.frozen)
            if not (args.load or args.pretrained_checkpoint):  # else the base comes later
                note_base(args, stages)
        if not wrap_with_ddp:
            for stage in stages:
                stage.requires_grad_(False)  # wrapped, so names stay, but without buffers
        for stage in stages:
            lay_out_frozen_experts(stage)
        prepare_for_training(stages, modules, ddp_config)
        return compose_hooks(self._model_config.post_wrap_hooks)(stages)

    def _build(self) -> list[MimoModel]:
        run, modules = self._model_config._run, self._model_config._modules
        parts = run.args, run.preset, run.configs, modules, run.schedule
        return build_vlm(*parts, run.parts.overrides, run.adapters)
