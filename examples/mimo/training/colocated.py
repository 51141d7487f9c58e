# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""``pretrain_mimo.py --mimo-layout colocated``: both modules on all ranks, each in its own layout.

Model, mock data and loss are those of that program. Only git checkouts of Megatron-LM have it, and
the modules of this folder that are imported here.
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from examples.mimo.common.layout import SIZES, Batch, Layout, Layouts, option_of
from examples.mimo.common.layout_rules import language_violation, size_violation, staged_pattern
from examples.mimo.common.megatron_rules import FAMILIES, IN_OTHERS, OF_MEGATRON
from examples.mimo.common.rules import check
from examples.mimo.common.steps import Microbatch, data_provider, held_out_steps, training_steps
from examples.mimo.model_providers import MimoProvider
from examples.mimo.training.batch import move_batch_to_cuda
from examples.mimo.training.data import _build_mock_vlm_dataloader, _mock_loader_kwargs
from examples.mimo.training.distributed import shutdown_distributed
from examples.mimo.training.runtime import _freeze_modality_submodule
from examples.mimo.training.step import loss_func
from megatron.core.enums import ModelType
from megatron.core.models.mimo.bridge.batch_plan import BatchPlan
from megatron.core.models.mimo.bridge.plan import AtomRows
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.forward.encoding import run_microbatch
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.setup.data_parallel import prepare_for_training
from megatron.core.models.mimo.setup.initialization import initialize_weights
from megatron.core.models.mimo.setup.module_groups import (
    Modules,
    encoder_part,
    limit_waiting,
    make_modules,
    prepare_process,
    schedule_collection,
    stages_of,
)
from megatron.core.models.mimo.setup.teardown import destroy
from megatron.core.transformer.moe.layout_free_router import freeze_routers
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.global_vars import get_args
from megatron.training.models.base import ModelBuilder, ModelConfig, compose_hooks
from megatron.training.training import pretrain

COLOCATED = "colocated"
SPLIT_SEEDS = {"train": 0, "test": 100_000}
VIRTUAL_STAGES = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


def add_layout_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--mimo-layout``; the options of the module grids give the sizes."""
    parser.add_argument(
        "--mimo-layout",
        choices=["non-colocated", COLOCATED],
        default="non-colocated",
        help="colocated: both modules on all ranks, which needs --llm-offset 0; --llm-cp, --llm-pp "
        "and --llm-ep may then be more than 1. Initial weights follow from the seed and each "
        "parameter's name, alike in every layout; --init-method-std is of the language model's "
        "matrices.",
    )
    # Upstream's main would save those of a tokenizer, and the program loads none.
    parser.set_defaults(save_tokenizer_assets=False)
    return parser


def take_sizes(args: argparse.Namespace) -> None:
    """Check the sizes of the grids, and set Megatron's own options to the language model's.

    Raises:
        ValueError, UserError: the sizes or options cannot work; on every rank alike.
    """
    for name in ("llm_only", "mimo_encoder_prefetch", *VIRTUAL_STAGES):
        if getattr(args, name):
            raise ValueError(f"{option_of(name)} does not go with {COLOCATED} modules")
    if args.llm_offset:
        raise ValueError(
            f"--mimo-layout {COLOCATED} needs --llm-offset 0, not {args.llm_offset}: both modules "
            "start at rank 0"
        )
    layouts = _layouts(args)
    on_gpus = argparse.Namespace(**vars(args) | {"device": "cuda"})
    run = SimpleNamespace(args=on_gpus, layouts=layouts)
    check(run, [*FAMILIES, *OF_MEGATRON, *IN_OTHERS])
    encoder, language = layouts.encoder, layouts.language
    sizes = vars(args) | {
        name: getattr(args, name) or 0 for name in ("num_experts", "moe_ffn_hidden_size")
    }
    is_recurrent = set("MG") & set(args.hybrid_layer_pattern)
    if language.cp > 1 and is_recurrent and args.linear_cp_mode != "chunkwise":
        raise ValueError(
            f"--llm-cp {language.cp} needs --linear-cp-mode chunkwise (state passing); "
            f"{args.linear_cp_mode} was dropped for {COLOCATED} modules"
        )
    broken = (
        size_violation(encoder, args.world_size)
        or language_violation(language, args.world_size, SimpleNamespace(**sizes), layouts.batch)
        or _slices_violation(layouts)
    )
    if broken:
        modules = f"encoder {encoder}, language model {language}"
        raise ValueError(f"--mimo-layout {COLOCATED}, {modules}: {broken}")
    for axis, name in SIZES["language"].items():
        setattr(args, name, getattr(language, axis))
    args.sequence_parallel = language.sequence_parallel
    if "|" not in args.hybrid_layer_pattern:
        args.hybrid_layer_pattern = staged_pattern(args.hybrid_layer_pattern, language)


def _layouts(args: argparse.Namespace) -> Layouts:
    return Layouts(
        (Layout(tp=args.encoder_tp, dp=args.encoder_dp, etp=args.encoder_tp),),
        Layout(
            tp=args.llm_tp,
            cp=args.llm_cp,
            pp=args.llm_pp,
            dp=args.llm_dp,
            ep=args.llm_ep,
            etp=args.llm_expt_tp or 1,
        ),
        Batch(args.global_batch_size, args.micro_batch_size, args.seq_length),
    )


def _slices_violation(layouts: Layouts) -> str | None:
    samples, dp = layouts.batch.micro_size * layouts.language.dp, layouts.encoder.dp
    if layouts.language.pp > 1:
        samples = layouts.batch.global_size
    return f"encoder dp={dp} must divide {samples} samples" if samples % dp else None


@dataclass(frozen=True)
class MockLoading:
    """A rank's samples of the mock data, whose global batches do not depend on the layout.

    Args:
        encoder_part: index of the run that this rank encodes of all samples that cross the bridge.
        language_dp: this rank's DP coordinate in the language model's grid.
    """

    args: argparse.Namespace
    layouts: Layouts
    encoder_name: str
    encoder_part: int
    language_dp: int
    source: Mapping[str, DataLoader]

    def training(self) -> Iterator[Microbatch]:
        """Yield microbatches without end, from the first sample that the run has not consumed."""
        for step in training_steps(self.args, self.layouts.language.dp):
            yield from self._microbatches("train", *step)

    def held_out(self) -> Iterator[Microbatch]:
        """Yield microbatches of the test split; every evaluation reads the same samples."""
        for step in held_out_steps(self.args, self.layouts.language.dp):
            yield from self._microbatches("test", *step)

    def _microbatches(
        self, split: str, first: int, count: int, micro_size: int
    ) -> Iterator[Microbatch]:
        """Yield the microbatches of one step.

        Samples cross the bridge microbatch by microbatch or, with a pipeline, all at once. Of those
        that cross at once, each rank of either module takes consecutive ones. The first microbatch
        brings all that the rank encodes, because only the loader can join the inputs of images of
        several sizes; so an encoder rank may have fewer samples than there are microbatches.
        """
        dp, parts = self.layouts.language.dp, self.layouts.encoder.dp
        at_once = count if self.layouts.language.pp > 1 else 1
        crossing = at_once * micro_size * dp
        for start in range(first, first + count * micro_size * dp, crossing):
            encoded = start + self.encoder_part * (crossing // parts)
            consumed = start + self.language_dp * (crossing // dp)
            for number in range(at_once):
                batch = self._collated(split, consumed + number * micro_size, micro_size)
                inputs = None
                if number == 0:
                    inputs = self._collated(split, encoded, crossing // parts)["modality_inputs"]
                plan = self._plan(split, number, at_once, crossing)
                yield move_batch_to_cuda(batch | {"modality_inputs": inputs}) | {"batch_plan": plan}

    def _collated(self, split: str, first: int, count: int) -> Microbatch:
        source = self.source[split]
        dataset = source.dataset
        return source.collate_fn([dataset[i % len(dataset)] for i in range(first, first + count)])

    def _plan(self, split: str, number: int, at_once: int, crossing: int) -> BatchPlan:
        """Plan microbatch ``number`` of those that cross at once; all samples have as many rows."""
        dp, parts = self.layouts.language.dp, self.layouts.encoder.dp
        atoms, rows = math.lcm(dp, parts), self.source[split].dataset.image_seq_length
        size = crossing // atoms  # samples of an atom
        encoded = np.full(atoms // parts, size * rows if number == 0 else 0)
        micro_size = crossing // dp // at_once
        samples = number * micro_size + np.arange(micro_size)
        consumed = np.bincount(samples // size, minlength=atoms // dp) * rows
        return BatchPlan(
            {self.encoder_name: AtomRows(encoded)}, {self.encoder_name: AtomRows(consumed)}
        )


def forward_step(microbatches: Iterator[Microbatch], model: MimoModel):
    """Run one microbatch, with or without a pipeline."""
    losses, loss_mask = run_microbatch(model, next(microbatches))
    return losses, partial(loss_func, loss_mask=loss_mask)


@dataclass(kw_only=True)
class ColocatedBuildConfig(ModelConfig):
    """The builder's inputs; Megatron does not serialize fields that begin with an underscore."""

    builder: ClassVar[str] = "examples.mimo.training.colocated.ColocatedBuilder"
    _provider: MimoProvider
    _modules: Modules


class ColocatedBuilder(ModelBuilder[MimoModel, ColocatedBuildConfig]):
    """Builds a provider's model with all its modules on this rank."""

    def build_model(self, pg_collection, pre_process=None, post_process=None, vp_stage=None):
        """Build the bare model; all arguments are ignored."""
        provider, modules = self._model_config._provider, self._model_config._modules
        args = get_args()
        # The encoder's configuration is made from these arguments, but only the language model has
        # CP and EP.
        alone = {"context_parallel_size": 1, "expert_model_parallel_size": 1}
        encoder_args = argparse.Namespace(**vars(args) | alone)
        model = MimoModel(
            MimoModelConfig(
                language_model_spec=provider.language_spec(
                    args, modules[LANGUAGE].groups, modules[LANGUAGE].grid
                ),
                modality_submodules_spec={
                    name: provider.encoder_specs[name](encoder_args, module.groups, module.grid)
                    for name, module in modules.items()
                    if name != LANGUAGE
                },
                special_token_ids=dict(provider.special_token_ids(args)),
                module_to_grid_map={name: module.grid for name, module in modules.items()},
            )
        )
        model.model_type = ModelType.encoder_or_decoder
        return model

    def build_distributed_models(self, pg_collection, ddp_config=None, **_) -> list[MimoModel]:
        """Build the model, initialized and ready to train.

        Args:
            pg_collection: ignored: each module has the groups of its own grid.
        """
        args, modules = get_args(), self._model_config._modules
        prepare_process(modules, args)
        model = self.build_model(pg_collection).cuda(torch.cuda.current_device())
        initialize_weights(model, args.seed, args.init_method_std)
        stages = compose_hooks(self._model_config.pre_wrap_hooks)([model])
        for submodule in model.modality_submodules.values():
            _freeze_modality_submodule(submodule, args)
        if args.freeze_lm:
            model.language_model.requires_grad_(False)
            freeze_routers(model.language_model)
        prepare_for_training(stages, modules, ddp_config)
        return compose_hooks(self._model_config.post_wrap_hooks)(stages)


def train(args: argparse.Namespace, provider: MimoProvider) -> None:
    """Train with Megatron's loop; collective over all ranks, whose default group exists already."""
    layouts, (name,) = _layouts(args), provider.encoder_module_names
    modules = make_modules(
        {name: (layouts.encoder, 0), LANGUAGE: (layouts.language, 0)},
        args.distributed_backend,
        args.num_distributed_optimizer_instances,
    )
    limit = timedelta(minutes=args.distributed_timeout_minutes)
    limit_waiting(limit)
    places = encoder_part(modules, name), modules[LANGUAGE].groups.dp.rank()
    source = {
        split: _build_mock_vlm_dataloader(
            batch_size=1,
            dataset_size=args.mock_dataset_size,
            seed=args.seed + seed,
            **_mock_loader_kwargs(args, name),
        )
        for split, seed in SPLIT_SEEDS.items()
    }
    build = ColocatedBuildConfig(_provider=provider, _modules=modules)
    stages = stages_of(build.post_wrap_hooks, limit)
    pretrain(
        pretrain_cfg_container_from_args(args, build),
        data_provider(MockLoading(args, layouts, name, *places, source)),
        ModelType.encoder_or_decoder,
        forward_step,
        skip_model_parallel_init=True,
        pg_collection=schedule_collection(modules),
    )
    destroy(stages, modules)
    shutdown_distributed()
