# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny MimoModels over given grids, and their layouts; the one-rank layout is the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from examples.mimo.nemotron_vlm.arguments import Options, parse
from examples.mimo.nemotron_vlm.data.sample import IMAGE
from examples.mimo.nemotron_vlm.layer_specs import layer_specs
from examples.mimo.nemotron_vlm.model import IMAGES, build_vlm
from examples.mimo.nemotron_vlm.placement import COLOCATED
from examples.mimo.nemotron_vlm.presets import PRESETS, EncoderPreset, LanguagePreset, VLMPreset
from examples.mimo.nemotron_vlm.projector import NormedProjector
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.module_groups import Modules
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.context_parallel_attention import ContextParallelAttention
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.moe.layout_free_router import with_layout_free_router
from megatron.core.transformer.sequence_parallel_norm import SequenceParallelNorm
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

SAMPLES, SEQUENCE = 16, 16
"""Of a step, and tokens of a sample."""

PRESET = VLMPreset(
    name="test",
    encoder=EncoderPreset(
        layers=1, hidden=16, heads=4, ffn=32, patch=4, tile=8, max_tile=8, class_tokens=2
    ),
    projector_ffn=32,
    language=LanguagePreset(
        hybrid_layer_pattern="ME*E",
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        num_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=16,
        moe_shared_expert_intermediate_size=16,
        mamba_num_heads=8,
        mamba_head_dim=4,
        mamba_num_groups=4,
        mamba_state_dim=8,
        vocab_size=32,
    ),
)
"""A tile is one token. Encoder tp=4 and language tp=2, cp=2, ep=8, etp=2 divide it."""

Build = Callable[[Options, Modules], MimoModel]


class TileMLP(NormedProjector):
    """The simplest encoder with tensor parallelism: an MLP over the pixels of a tile."""

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """Map [n, 3, H, W], pixels in 0 … 255, to [n, hidden of the language model]."""
        return super().forward(tiles.flatten(1).to(self.config.params_dtype) / 255)


def _mimo_model(language: ModuleSpec, options: Options, modules: Modules) -> MimoModel:
    """A MimoModel of the simple encoder and a language model, its weights not initialized."""
    groups = modules[IMAGES].groups
    mlp = layer_specs("local").projector_mlp
    encoder = ModuleSpec(
        module=TileMLP,
        params={
            "config": options.configs.projector,
            "norm": SequenceParallelNorm,
            "submodules": mlp,
            "input_size": 3 * PRESET.encoder.tile**2,
            "pg_collection": groups,
        },
    )
    vision = ModuleSpec(
        module=VisionModalitySubmodules,
        params={"pg_collection": groups},
        submodules={"encoders": {"radio": encoder}},  # the name that batches have
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


def _language_params(options: Options, groups: ProcessGroupCollection | None) -> dict:
    if groups is None:
        return {}
    stage, stages = groups.pp.rank(), groups.pp.size()
    return {
        "vocab_size": options.args.padded_vocab_size,
        "max_sequence_length": options.args.seq_length,
        "pre_process": stage == 0,
        "post_process": stage == stages - 1,
        "scatter_embedding_sequence_parallel": False,
        "pg_collection": groups,
    }


def _nemotron_gpt_config(options: Options) -> TransformerConfig:
    """Squared ReLU, sigmoid scores with expert bias and scaling, shared expert, seq aux loss."""
    return replace(options.configs.language, is_hybrid_model=False, num_layers=2)


def _plain_gpt_config(options: Options) -> TransformerConfig:
    """GELU, softmax scores, and no balancing."""
    return replace(
        _nemotron_gpt_config(options),
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
    make_config: Callable[[Options], TransformerConfig], options: Options, modules: Modules
) -> MimoModel:
    config = make_config(options)
    language = ModuleSpec(
        module=GPTModel,
        params={
            "config": config,
            "transformer_layer_spec": _gpt_stack(config),
            "position_embedding_type": "rope",
            **_language_params(options, modules[LANGUAGE].groups),
        },
    )
    return _mimo_model(language, options, modules)


def build_mamba_moe(options: Options, modules: Modules) -> MimoModel:
    """Simple encoder and the hybrid Mamba-MoE language model."""
    language = ModuleSpec(
        module=HybridModel,
        params={
            "config": options.configs.language,
            "hybrid_stack_spec": layer_specs("local").hybrid_stack,
            "hybrid_layer_pattern": options.args.hybrid_layer_pattern,
            "position_embedding_type": "none",
            **_language_params(options, modules[LANGUAGE].groups),
        },
    )
    return _mimo_model(language, options, modules)


def build_radio_mamba_moe(options: Options, modules: Modules) -> MimoModel:
    """RADIO, projector and the hybrid Mamba-MoE language model, as the training program's."""
    specs = layer_specs("local")
    (model,) = build_vlm(options.args, options.preset, options.configs, modules, specs)
    return model


build_plain_moe_gpt: Build = partial(_build_gpt, _plain_gpt_config)
"""Simple encoder and a GPT with plain experts."""

build_nemotron_moe_gpt: Build = partial(_build_gpt, _nemotron_gpt_config)
"""Simple encoder and a GPT with experts as Nemotron has them."""


def make_options(
    encoder: str,
    language: str,
    world_size: int,
    micro_size: int = 4,
    placement: str = COLOCATED,
    preset: VLMPreset = PRESET,
) -> Options:
    """What the program makes of layouts; ``micro_size`` is a DP rank's."""
    PRESETS[preset.name] = lambda: preset
    return parse(
        [
            *("--model", preset.name, "--placement", placement),
            *("--encoder", encoder, "--language", language, "--seq-length", str(SEQUENCE)),
            *("--global-batch-size", str(SAMPLES), "--micro-batch-size", str(micro_size)),
        ],
        world_size,
    )


def one_rank(preset: VLMPreset = PRESET) -> Options:
    """The reference: all samples in one microbatch."""
    return make_options("", "", world_size=1, micro_size=SAMPLES, preset=preset)
