# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny MimoModels over given grids, and their layouts; the one-rank layout is the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from examples.mimo.nemotron_vlm.data.sample import IMAGE
from examples.mimo.nemotron_vlm.layer_specs import layer_specs
from examples.mimo.nemotron_vlm.layout import Batch, Layout, Layouts, parse_layout
from examples.mimo.nemotron_vlm.layout_rules import resolve
from examples.mimo.nemotron_vlm.model import (
    IMAGES,
    ModuleGroups,
    build_vlm,
    language_config,
    projector_config,
)
from examples.mimo.nemotron_vlm.placement import COLOCATED
from examples.mimo.nemotron_vlm.presets import EncoderPreset, LanguagePreset, VLMPreset
from examples.mimo.nemotron_vlm.projector import NormedProjector
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.context_parallel_attention import ContextParallelAttention
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.moe.layout_free_router import with_layout_free_router
from megatron.core.transformer.sequence_parallel_norm import SequenceParallelNorm
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

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
    norm, experts = SequenceParallelNorm, with_layout_free_router(layer.submodules.mlp)
    layer.submodules = replace(
        layer.submodules, input_layernorm=norm, pre_mlp_layernorm=norm, mlp=experts
    )
    layers = config.num_layers // config.pipeline_model_parallel_size
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)


def _build_gpt(
    make_config: Callable[[Layout], TransformerConfig],
    layouts: Layouts,
    modules: dict[str, ModuleGroups],
) -> MimoModel:
    config = replace(make_config(layouts.language), variable_seq_lengths=layouts.non_colocated)
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
                PRESET, layouts.language, torch.float32, non_colocated=layouts.non_colocated
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
