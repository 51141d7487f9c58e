# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny MimoModels over given grids, their training, and the one-rank run that it must equal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from examples.mimo.nemotron_vlm.batches import BatchPlan
from examples.mimo.nemotron_vlm.data import SampleSource, make_source
from examples.mimo.nemotron_vlm.data.sample import IMAGE
from examples.mimo.nemotron_vlm.initialization import initialize_weights
from examples.mimo.nemotron_vlm.layer_specs import layer_specs
from examples.mimo.nemotron_vlm.layout import Batch, Layout, Layouts, parse_layout
from examples.mimo.nemotron_vlm.layout_rules import resolve
from examples.mimo.nemotron_vlm.loss import summed_loss
from examples.mimo.nemotron_vlm.model import (
    IMAGES,
    ModuleGroups,
    build_vlm,
    language_config,
    projector_config,
)
from examples.mimo.nemotron_vlm.modules import make_grid, make_modules, prepare_megatron
from examples.mimo.nemotron_vlm.placement import COLOCATED
from examples.mimo.nemotron_vlm.presets import EncoderPreset, LanguagePreset, VLMPreset
from examples.mimo.nemotron_vlm.projector import NormedProjector
from examples.mimo.nemotron_vlm.trainer import wrap_in_ddp
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.config.role import ModuleLayout
from megatron.core.models.mimo.grad_finalization import global_token_count
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.optimizer import get_mimo_optimizer
from megatron.core.models.mimo.separate_schedule import (
    destroy_bridges,
    encoders_to_language,
    language_total,
    own_groups,
    separate_forward_backward,
)
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.context_parallel_attention import ContextParallelAttention
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.sequence_parallel_norm import SequenceParallelNorm
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from tests.unit_tests.models.group_threads import free_groups
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils

BACKEND = "nccl" if HAVE_CUDA else "gloo"
SEED = 0
BATCH = Batch(global_size=16, micro_size=4, seq_length=16)

PRESET = VLMPreset(
    name="test",
    encoder=EncoderPreset(
        layers=1, hidden=16, heads=4, ffn=32, patch=4, tile=8, max_tile=8, class_tokens=2
    ),
    projector_ffn=32,
    language=LanguagePreset(
        pattern="ME*E",
        hidden=16,
        heads=4,
        query_groups=2,
        kv_channels=4,
        experts=8,
        topk=2,
        expert_ffn=16,
        shared_ffn=16,
        mamba_heads=8,
        mamba_head_dim=4,
        mamba_groups=4,
        mamba_state=8,
        vocab=32,
    ),
)
"""A tile is one token. Encoder tp=4 and language tp=2, cp=2, ep=8, etp=2 divide it."""

ADAM = OptimizerConfig(
    optimizer="adam", lr=1e-3, adam_eps=1e-3, clip_grad=1.0, use_distributed_optimizer=True
)
"""The epsilon is of the gradients' size: with a small one Adam makes full steps of rounding."""

Build = Callable[[Layouts, dict[str, ModuleGroups]], MimoModel]


class TileMLP(NormedProjector):
    """The simplest encoder with tensor parallelism: an MLP over the pixels of a tile."""

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """Map [n, 3, H, W] to [n, hidden of the language model]."""
        return super().forward(tiles.flatten(1))


def _mimo_model(
    language: ModuleSpec, layouts: Layouts, modules: dict[str, ModuleGroups]
) -> MimoModel:
    """A MimoModel of the simple encoder and a language model, its weights not initialized."""
    groups = modules[IMAGES].groups
    mlp = layer_specs("local").projector_mlp
    encoder = ModuleSpec(
        module=TileMLP,
        params={
            "config": projector_config(PRESET, layouts.encoder, torch.float32),
            "norm": SequenceParallelNorm,
            "submodules": mlp,
            "input_size": 3 * PRESET.encoder.tile**2,
            "pg_collection": groups,
        },
    )
    vision = ModuleSpec(
        module=VisionModalitySubmodules,
        params={"pg_collection": groups},
        submodules={"encoders": {"radio": encoder}},  # the name that BatchPlan's batches have
    )
    model = MimoModel(
        MimoModelConfig(
            language_model_spec=language,
            modality_submodules_spec={IMAGES: vision},
            special_token_ids={IMAGES: IMAGE},
            module_to_grid_map={name: module.grid for name, module in modules.items()},
        )
    )
    model.model_type = ModelType.encoder_or_decoder
    return model


def _language_params(layouts: Layouts, groups: ProcessGroupCollection | None) -> dict:
    if groups is None:
        return {}
    stage, stages = groups.pp.rank(), groups.pp.size()
    return {
        "vocab_size": PRESET.language.vocab,
        "max_sequence_length": layouts.batch.seq_length,
        "pre_process": stage == 0,
        "post_process": stage == stages - 1,
        "scatter_embedding_sequence_parallel": False,
        "pg_collection": groups,
    }


def _nemotron_gpt_config(layout: Layout) -> TransformerConfig:
    """Squared ReLU, sigmoid scores with expert bias and scaling, shared expert, seq aux loss."""
    config = language_config(PRESET, layout, torch.float32)
    return replace(config, is_hybrid_model=False, num_layers=2)


def _plain_gpt_config(layout: Layout) -> TransformerConfig:
    """GELU, softmax scores, and no balancing."""
    return replace(
        _nemotron_gpt_config(layout),
        activation_func=F.gelu,
        moe_shared_expert_intermediate_size=None,
        moe_router_score_function="softmax",
        moe_router_topk_scaling_factor=None,
        moe_router_enable_expert_bias=False,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def _gpt_stack(config: TransformerConfig) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    attention = layer.submodules.self_attention
    attention.submodules.core_attention = ContextParallelAttention
    norm = SequenceParallelNorm
    layer.submodules = replace(layer.submodules, input_layernorm=norm, pre_mlp_layernorm=norm)
    layers = config.num_layers // config.pipeline_model_parallel_size
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)


def _build_gpt(
    make_config: Callable[[Layout], TransformerConfig],
    layouts: Layouts,
    modules: dict[str, ModuleGroups],
) -> MimoModel:
    config = replace(make_config(layouts.language), variable_seq_lengths=layouts.separate)
    language = ModuleSpec(
        module=GPTModel,
        params={
            "config": config,
            "transformer_layer_spec": _gpt_stack(config),
            "position_embedding_type": "rope",
            **_language_params(layouts, modules[LANGUAGE].groups),
        },
    )
    return _mimo_model(language, layouts, modules)


def build_mamba_moe(layouts: Layouts, modules: dict[str, ModuleGroups]) -> MimoModel:
    """Simple encoder and the hybrid Mamba-MoE language model."""
    language = ModuleSpec(
        module=HybridModel,
        params={
            "config": language_config(
                PRESET, layouts.language, torch.float32, separate=layouts.separate
            ),
            "hybrid_stack_spec": layer_specs("local").hybrid_stack,
            "hybrid_layer_pattern": PRESET.language.pattern,
            "position_embedding_type": "none",
            **_language_params(layouts, modules[LANGUAGE].groups),
        },
    )
    return _mimo_model(language, layouts, modules)


def build_radio_mamba_moe(layouts: Layouts, modules: dict[str, ModuleGroups]) -> MimoModel:
    """RADIO, projector and the hybrid Mamba-MoE language model, as the training program's."""
    (model,) = build_vlm(PRESET, layouts, modules, layer_specs("local"), torch.float32)
    return model


build_plain_moe_gpt: Build = partial(_build_gpt, _plain_gpt_config)
"""Simple encoder and a GPT with plain experts."""

build_nemotron_moe_gpt: Build = partial(_build_gpt, _nemotron_gpt_config)
"""Simple encoder and a GPT with experts as Nemotron has them."""


def make_layouts(
    encoder: str,
    language: str,
    world_size: int,
    batch: Batch = BATCH,
    placement: str = COLOCATED,
    preset: VLMPreset = PRESET,
) -> Layouts:
    """Layouts from the program's notation, checked; ``batch.micro_size`` is a DP rank's."""
    parsed = parse_layout(encoder, "encoder"), parse_layout(language, "language")
    return resolve(*parsed, batch, world_size, preset, placement)


ONE_RANK = make_layouts("", "", world_size=1, batch=replace(BATCH, micro_size=BATCH.global_size))


@contextlib.contextmanager
def modules_of(layouts: Layouts) -> Iterator[dict[str, ModuleGroups]]:
    """Groups of both modules over the world; they end with the block."""
    modules = make_modules(layouts, BACKEND)
    try:
        yield modules
    finally:
        for module in modules.values():
            module.grid.destroy()


@contextlib.contextmanager
def modules_of_one_rank() -> Iterator[dict[str, ModuleGroups]]:
    """Both modules on a grid of this rank alone: the one-rank run, on each rank.

    All ranks make it, because the optimizer and its norm speak to the world.
    """
    grids = [make_grid(ONE_RANK.language, BACKEND, rank) for rank in range(Utils.world_size)]
    collections = [ProcessGroupCollection.from_hyper_comm_grid(grid) for grid in grids]
    own = ModuleGroups(grids[Utils.rank], collections[Utils.rank])
    try:
        yield {IMAGES: own, LANGUAGE: own}
    finally:
        for grid in grids:
            grid.destroy()


def microbatches(
    layouts: Layouts,
    modules: dict[str, ModuleGroups],
    step: int,
    source: SampleSource | None = None,
) -> list[dict]:
    """This rank's microbatches of one step of random data, as MimoModel's arguments."""
    dp = {name: module.groups and module.groups.dp.rank() for name, module in modules.items()}
    plan = BatchPlan(
        layouts,
        encoder_dp=dp[IMAGES],
        language_dp=dp[LANGUAGE],
        tokens_per_tile=PRESET.encoder.tokens_per_tile,
    )
    source = source or make_source("mock", PRESET.encoder, layouts.batch.seq_length, SEED)
    return plan.microbatches(source, "train", step, Utils.device)


@dataclass
class Run:
    """What training did.

    Args:
        losses: per token, of each step.
        grad_norms: of each step.
        experts: this rank's experts after the first step, by their names on one rank.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    experts: dict[str, torch.Tensor] = field(default_factory=dict)


@contextlib.contextmanager
def initialized(
    build: Build, layouts: Layouts, modules: dict[str, ModuleGroups]
) -> Iterator[MimoModel]:
    """The model with its initial weights; what Megatron keeps per process ends with the block."""
    prepare_megatron(modules, SEED)
    model = build(layouts, modules).to(Utils.device)
    initialize_weights(model, SEED)
    try:
        yield model
    finally:
        model.destroy()
        free_groups(model)
        parallel_state.destroy_global_memory_buffer()
        destroy_moe_metrics_tracker()


def train(
    build: Build,
    layouts: Layouts,
    modules: dict[str, ModuleGroups],
    steps: int,
    source: SampleSource | None = None,
) -> Run:
    """Train with Adam, over the groups of ``modules``, on random data or those of ``source``."""
    groups = modules[LANGUAGE].groups
    with initialized(build, layouts, modules) as model:
        wrap_in_ddp([model])
        optimizer = get_mimo_optimizer(model, ADAM)
        run = Run()
        with _schedule(model, layouts, modules) as schedule:
            for step in range(steps):
                batches = microbatches(layouts, modules, step, source)
                reports = _forward_backward(model, optimizer, layouts, schedule, batches)
                stepped, grad_norm, _ = optimizer.step()
                assert stepped
                loss, tokens = _total(reports, model, modules)
                run.losses.append(loss / tokens)
                run.grad_norms.append(grad_norm)
                if groups is not None:
                    run.experts = run.experts or experts(model, groups)
    return run


@contextlib.contextmanager
def _schedule(model: MimoModel, layouts: Layouts, modules: dict[str, ModuleGroups]):
    if not layouts.separate:
        yield partial(forward_backward_no_pipelining, pg_collection=modules[LANGUAGE].groups)
        return
    try:
        yield partial(
            separate_forward_backward,
            communicator=encoders_to_language(model),
            groups={name: module.groups for name, module in modules.items()},
        )
    finally:
        destroy_bridges()


def _forward_backward(model, optimizer, layouts, schedule, batches: list[dict]) -> list:
    held = (*model.modality_submodules.values(), model.language_model)
    for module in (module for module in held if module is not None):
        module.zero_grad_buffer()
    optimizer.zero_grad()
    return schedule(
        forward_step_func=_forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=layouts.num_microbatches,
        seq_length=layouts.batch.seq_length,
        micro_batch_size=layouts.batch.micro_size,
    )


def _total(reports: list[torch.Tensor], model, modules) -> list[float]:
    total = sum(reports, torch.zeros(2, dtype=torch.float64, device=Utils.device))
    groups = {name: module.groups for name, module in modules.items()}
    if model.role.mode is ModuleLayout.NON_COLOCATED:
        return language_total(total, model, own_groups(groups)).tolist()
    return global_token_count(total, groups[LANGUAGE]).tolist()


def _forward_step(batches: Iterator[dict], model: MimoModel):
    output, loss_mask = model(**next(batches))
    return output, partial(summed_loss, loss_mask=loss_mask)


def experts(model: MimoModel, groups: ProcessGroupCollection) -> dict[str, torch.Tensor]:
    """Copies of this rank's expert weights, by the names they have on one rank."""
    first = groups.ep.rank() * (model.config.num_moe_experts // groups.ep.size())
    weights = {}
    for name, parameter in unwrap_model(model.language_model).named_parameters():
        layer, marker, local = name.partition("local_experts.")
        if marker:
            index, _, rest = local.partition(".")
            weights[f"{layer}{marker}{first + int(index)}.{rest}"] = parameter.detach().clone()
    return weights


def expert_shard(
    whole: torch.Tensor, part: torch.Tensor, groups: ProcessGroupCollection
) -> torch.Tensor:
    """What this rank's expert-TP coordinate holds of ``whole``, split where ``part`` is smaller."""
    split = [dim for dim in range(whole.dim()) if whole.shape[dim] != part.shape[dim]]
    if not split:
        return whole
    (dim,) = split
    return whole.chunk(groups.expt_tp.size(), dim)[groups.expt_tp.rank()]


def process_groups() -> int:
    """Process groups that this rank is in."""
    return len(dist.distributed_c10d._world.pg_map)
