# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The layer implementations that each part of the model is built of."""

from dataclasses import dataclass, replace
from functools import partial

from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.packed_flash_attention import packed_attention
from megatron.core.transformer.spec_utils import ModuleSpec


@dataclass(frozen=True)
class LayerSpecs:
    """Layer specs of the ViT, the projector and the hybrid stack."""

    vit_layer: ModuleSpec
    projector_norm: type
    projector_mlp: MLPSubmodules
    hybrid_stack: ModuleSpec


def layer_specs(
    transformer_impl: str, has_flash4: bool = False, has_own_experts: bool = False
) -> LayerSpecs:
    """Return the specs for 'local' (Megatron's own layers) or Transformer Engine (on GPUs).

    Args:
        has_flash4: whether flash-attn-4 computes the attention of packed images.
        has_own_experts: whether routed experts are Megatron's own also with Transformer Engine,
            whose grouped layers take no adapters.
    """
    if transformer_impl == "local":
        return _local()
    return _transformer_engine(has_flash4, has_own_experts)


def _local() -> LayerSpecs:
    from megatron.core.models.hybrid import hybrid_local_specs as local
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.context_parallel_attention import ContextParallelAttention
    from megatron.core.transformer.sequence_parallel_norm import SequenceParallelNorm

    return LayerSpecs(
        vit_layer=local.vit_local_layer_spec(ContextParallelAttention),
        projector_norm=SequenceParallelNorm,
        projector_mlp=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        hybrid_stack=local.get_hybrid_local_stack_spec(ContextParallelAttention),
    )


def _transformer_engine(has_flash4: bool, has_own_experts: bool) -> LayerSpecs:
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TEDotProductAttention,
        TELayerNormColumnParallelLinear,
        TENorm,
        TERowParallelLinear,
    )
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.vision.vit_layer_specs import (
        get_vit_layer_with_transformer_engine_spec,
    )
    from megatron.core.ssm.silu_gated_delta_net import SiluGatedDeltaNet
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.grouped_experts import with_own_parts

    class BiasInGemm(TELayerNormColumnParallelLinear):
        """Adds its bias in the GEMM; MLP would add it in a separate pass before an exact GELU."""

        def __init__(self, *args, skip_bias_add: bool, **kwargs) -> None:
            super().__init__(*args, skip_bias_add=False, **kwargs)

    class PackedFlashAttention(TEDotProductAttention):
        """Has no parameters, so checkpoints do not depend on it."""

        def forward(self, query, key, value, *_, packed_seq_params, **__):
            packed = packed_seq_params
            bounds, longest = packed.cu_seqlens_q, packed.max_seqlen_q
            return packed_attention(query, key, value, bounds, longest).flatten(1)

    vit = get_vit_layer_with_transformer_engine_spec()
    attention = vit.submodules.self_attention
    if has_flash4:
        parts = replace(attention.submodules, core_attention=PackedFlashAttention)
        attention = replace(attention, submodules=parts)
    mlp = MLPSubmodules(linear_fc1=BiasInGemm, linear_fc2=TERowParallelLinear)
    layers = hybrid_stack_spec.submodules
    gdn = layers.gdn_layer
    mixer = replace(gdn.submodules.self_attention, module=SiluGatedDeltaNet)
    gdn = replace(gdn, submodules=replace(gdn.submodules, self_attention=mixer))
    moe = layers.moe_layer
    builder = moe.submodules.mlp
    if has_own_experts:
        own = get_moe_module_spec(use_te=False, num_experts=1).keywords["submodules"].experts
        parts = replace(builder.keywords["submodules"], experts=own)
        builder = partial(builder.func, submodules=parts)
    moe = replace(moe, submodules=replace(moe.submodules, mlp=with_own_parts(builder)))
    return LayerSpecs(
        vit_layer=replace(
            vit,
            submodules=replace(
                vit.submodules,
                self_attention=attention,
                mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
            ),
        ),
        projector_norm=TENorm,
        projector_mlp=MLPSubmodules(
            linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear
        ),
        hybrid_stack=replace(
            hybrid_stack_spec, submodules=replace(layers, gdn_layer=gdn, moe_layer=moe)
        ),
    )
