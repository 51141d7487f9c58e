# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Build the Nemotron VLM as a MimoModel over given grids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from examples.mimo.nemotron_vlm.data.sample import IMAGE
from examples.mimo.nemotron_vlm.layer_specs import LayerSpecs
from examples.mimo.nemotron_vlm.layout import Layout, Layouts
from examples.mimo.nemotron_vlm.presets import VLMPreset
from examples.mimo.nemotron_vlm.projector import NormedProjector
from examples.mimo.nemotron_vlm.radio_encoder import RADIOEncoderWrapper
from examples.mimo.nemotron_vlm.recurrent_cp import RecurrentCP
from examples.mimo.nemotron_vlm.vision_stage import VisionStage
from megatron.core.activations import squared_relu
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

IMAGES = "images"
"""Name of the vision module in grids, batches and checkpoints."""


@dataclass(frozen=True)
class ModuleGroups:
    """One module's grid and the process groups made from it; None on ranks outside the grid."""

    grid: HyperCommGrid
    groups: ProcessGroupCollection | None


def _common(layout: Layout, dtype: torch.dtype, non_colocated: bool = False) -> dict:
    return {
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "context_parallel_size": layout.cp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        # Batched, messages of two stages that are both before and after each other would mix.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        "variable_seq_lengths": non_colocated,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": False,
        "perform_initialization": False,
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
    }


def encoder_config(preset: VLMPreset, layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    """The ViT's configuration."""
    p = preset.encoder
    return TransformerConfig(
        num_layers=p.layers,
        hidden_size=p.hidden,
        num_attention_heads=p.heads,
        ffn_hidden_size=p.ffn,
        normalization="LayerNorm",
        activation_func=F.gelu,
        **_common(layout, dtype) | {"add_bias_linear": True},
    )


def projector_config(preset: VLMPreset, layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    """The projector's configuration; it shares the encoder's layout."""
    return TransformerConfig(
        num_layers=1,
        hidden_size=preset.language.hidden,
        num_attention_heads=preset.encoder.heads,  # unused, but Megatron wants tp to divide it
        kv_channels=1,
        ffn_hidden_size=preset.projector_ffn,
        normalization="RMSNorm",
        activation_func=squared_relu,
        **_common(layout, dtype),
    )


def language_config(
    preset: VLMPreset,
    layout: Layout,
    dtype: torch.dtype,
    *,
    recurrent_cp: RecurrentCP = RecurrentCP(),  # noqa: B008  frozen
    non_colocated: bool = False,
) -> TransformerConfig:
    """The hybrid language model's configuration; non-colocated stages announce tensor shapes."""
    p = preset.language
    return TransformerConfig(
        num_layers=len(p.pattern),
        hidden_size=p.hidden,
        num_attention_heads=p.heads,
        num_query_groups=p.query_groups,
        kv_channels=p.kv_channels,
        ffn_hidden_size=p.expert_ffn,
        normalization="RMSNorm",
        activation_func=squared_relu,
        is_hybrid_model=True,
        mamba_num_heads=p.mamba_heads,
        mamba_head_dim=p.mamba_head_dim,
        mamba_num_groups=p.mamba_groups,
        mamba_state_dim=p.mamba_state,
        linear_key_head_dim=p.gdn_head_dim,
        linear_value_head_dim=p.gdn_head_dim,
        linear_num_key_heads=p.gdn_key_heads,
        linear_num_value_heads=p.gdn_value_heads,
        linear_context_parallel=recurrent_cp.mode,
        hybrid_token_layout=recurrent_cp.token_layout,
        num_moe_experts=p.experts,
        moe_router_topk=p.topk,
        moe_ffn_hidden_size=p.expert_ffn,
        moe_shared_expert_intermediate_size=p.shared_ffn,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=2.5,
        moe_router_enable_expert_bias=True,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1e-4,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.sequence_parallel,
        # The fused loss rounds the gradient of the logits to bf16, whatever their type.
        cross_entropy_loss_fusion=dtype is torch.bfloat16,
        cross_entropy_fusion_impl="native",
        **_common(layout, dtype, non_colocated),
    )


def _vision_spec(
    preset: VLMPreset, layout: Layout, dtype: torch.dtype, specs: LayerSpecs, groups
) -> ModuleSpec:
    radio = ModuleSpec(
        module=RADIOEncoderWrapper,
        params={
            "config": encoder_config(preset, layout, dtype),
            "layer_spec": specs.vit_layer,
            "preset": preset.encoder,
            "pg_collection": groups,
        },
    )
    projector = ModuleSpec(
        module=NormedProjector,
        params={
            "config": projector_config(preset, layout, dtype),
            "norm": specs.projector_norm,
            "submodules": specs.projector_mlp,
            "input_size": preset.encoder.output_size,
            "pg_collection": groups,
        },
    )
    return ModuleSpec(
        module=VisionStage,
        params={"pg_collection": groups},
        submodules={"encoders": {"radio": radio}, "input_projections": [projector]},
    )


def _language_spec(
    preset: VLMPreset,
    layouts: Layouts,
    dtype: torch.dtype,
    specs: LayerSpecs,
    groups: ProcessGroupCollection | None,
    vp_stage: int | None,
) -> ModuleSpec:
    config = language_config(
        preset,
        layouts.language,
        dtype,
        recurrent_cp=layouts.recurrent_cp,
        non_colocated=layouts.non_colocated,
    )
    if groups is None:
        return ModuleSpec(module=HybridModel, params={"config": config})
    stage, stages = groups.pp.rank(), groups.pp.size()
    return ModuleSpec(
        module=HybridModel,
        params={
            "config": config,
            "hybrid_stack_spec": specs.hybrid_stack,
            "vocab_size": preset.language.vocab,
            "max_sequence_length": layouts.batch.seq_length,
            "hybrid_layer_pattern": staged_pattern(preset.language.pattern, layouts.language),
            "pre_process": stage == 0 and not vp_stage,
            "post_process": stage == stages - 1 and vp_stage in (None, layouts.language.vpp - 1),
            "vp_stage": vp_stage,
            "share_embeddings_and_output_weights": False,
            "position_embedding_type": "none",
            "scatter_embedding_sequence_parallel": False,
            "pg_collection": groups,
        },
    )


def staged_pattern(pattern: str, layout: Layout) -> str:
    """The layers with ``|`` between (virtual) pipeline stages, which have as many layers each."""
    size = len(pattern) // (layout.pp * layout.vpp)
    return "|".join(pattern[i : i + size] for i in range(0, len(pattern), size))


def build_vlm(
    preset: VLMPreset,
    layouts: Layouts,
    modules: dict[str, ModuleGroups],
    specs: LayerSpecs,
    dtype: torch.dtype,
) -> list[MimoModel]:
    """Build the bare model on this rank; its weights are not initialized.

    Args:
        modules: grid and groups of IMAGES and LANGUAGE.
        specs: layer implementations.
        dtype: of the parameters.

    Returns:
        One MimoModel for each virtual pipeline stage; the first holds the encoder.
    """
    language = modules[LANGUAGE]
    vision = _vision_spec(preset, layouts.encoder, dtype, specs, modules[IMAGES].groups)
    stages = []
    for number in range(layouts.language.vpp):
        vp_stage = number if layouts.language.vpp > 1 else None
        held = modules if number == 0 else {LANGUAGE: language}
        stage = MimoModel(
            MimoModelConfig(
                language_model_spec=_language_spec(
                    preset, layouts, dtype, specs, language.groups, vp_stage
                ),
                modality_submodules_spec={IMAGES: vision} if number == 0 else {},
                special_token_ids={IMAGES: IMAGE},
                module_to_grid_map={name: module.grid for name, module in held.items()},
            )
        )
        stage.model_type = ModelType.encoder_or_decoder
        stage.vp_stage = vp_stage
        stages.append(stage)
    return stages
