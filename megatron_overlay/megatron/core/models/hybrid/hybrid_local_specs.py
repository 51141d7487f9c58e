# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Layer specs of the hybrid language model and of its ViT encoder without Transformer Engine.

The layers are Megatron's own. Transformer Engine fuses a norm into the projection that follows it;
here each norm is a module of its own. Checkpoints of both use Transformer Engine's names: the
parameter `norm.weight` here is saved as `mixer.in_proj.layer_norm_weight`.
"""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.ssm.silu_gated_delta_net import SiluGatedDeltaNet
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.grouped_experts import with_own_parts
from megatron.core.transformer.sequence_parallel_norm import SequenceParallelNorm
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

FUSED_NORMS = {
    "mamba": {"norm.": "mixer.in_proj.layer_norm_"},
    "gdn": {"input_layernorm.": "self_attention.in_proj.layer_norm_"},
    "attention": {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    "mlp": {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
}
"""Checkpoint names of the norms that Transformer Engine fuses; it does not fuse that of experts."""


def get_hybrid_local_stack_spec(core_attention: type = DotProductAttention) -> ModuleSpec:
    """Return the spec of a hybrid stack.

    Its layers are `M` (Mamba-2), `G` (gated delta net), `*` (attention), `-` (MLP), `E` (experts).
    """
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=_mamba_layer(),
            gdn_layer=_transformer_layer(
                ModuleSpec(
                    module=SiluGatedDeltaNet,
                    submodules=GatedDeltaNetSubmodules(
                        in_proj=ColumnParallelLinear,
                        out_norm=SequenceParallelNorm,
                        out_proj=RowParallelLinear,
                    ),
                ),
                sharded_state_dict_keys_map=FUSED_NORMS["gdn"],
            ),
            attention_layer=_transformer_layer(
                _self_attention(AttnMaskType.causal, core_attention),
                sharded_state_dict_keys_map=FUSED_NORMS["attention"],
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=SequenceParallelNorm,
                    mlp=get_mlp_module_spec(use_te=False),
                    mlp_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map=FUSED_NORMS["mlp"],
                ),
            ),
            moe_layer=ModuleSpec(
                module=MoETransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=SequenceParallelNorm,
                    # The spec is the same for any number of experts, which the config gives.
                    mlp=with_own_parts(get_mlp_module_spec(use_te=False, num_experts=1)),
                    mlp_bda=get_bias_dropout_add,
                ),
            ),
            final_norm=SequenceParallelNorm,
            mtp_block_spec=_multi_token_prediction(),
        ),
    )


def vit_local_layer_spec(core_attention: type = DotProductAttention) -> ModuleSpec:
    """Return the spec of a vision transformer's layer: attention to all tokens, then an MLP."""
    return _transformer_layer(
        _self_attention(AttnMaskType.no_mask, core_attention),
        pre_mlp_layernorm=SequenceParallelNorm,
        mlp=get_mlp_module_spec(use_te=False),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=FUSED_NORMS["attention"] | FUSED_NORMS["mlp"],
    )


def _transformer_layer(self_attention: ModuleSpec, **others) -> ModuleSpec:
    submodules = TransformerLayerSubmodules(
        input_layernorm=SequenceParallelNorm,
        self_attention=self_attention,
        self_attn_bda=get_bias_dropout_add,
        **others,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _mamba_layer() -> ModuleSpec:
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=SequenceParallelNorm,
            mixer=ModuleSpec(
                module=MambaMixer,
                submodules=MambaMixerSubmodules(
                    in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
                ),
            ),
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=FUSED_NORMS["mamba"],
        ),
    )


def _multi_token_prediction() -> ModuleSpec:
    layer = multi_token_prediction.MultiTokenPredictionLayerSubmodules(
        enorm=SequenceParallelNorm,
        hnorm=SequenceParallelNorm,
        layer_norm=SequenceParallelNorm,
        eh_proj=ColumnParallelLinear,
    )  # the layers' pattern gives its inner layers
    block = multi_token_prediction.MultiTokenPredictionBlockSubmodules(
        layer_specs=[
            ModuleSpec(module=multi_token_prediction.MultiTokenPredictionLayer, submodules=layer)
        ]
    )
    return ModuleSpec(module=multi_token_prediction.MultiTokenPredictionBlock, submodules=block)


def _self_attention(mask: AttnMaskType, core_attention: type) -> ModuleSpec:
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=core_attention,
            linear_proj=RowParallelLinear,
        ),
    )
