# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run upstream's ``pretrain_mimo.py`` where neither Transformer Engine nor its RADIO would fit.

Its providers name Transformer Engine's layers and a ViT of 32 layers; here they get Megatron's own
layers and two. RADIO moves its position embeddings at random in training; here it does not, so that
losses can be compared. The program itself runs as it is.
"""

import runpy
from functools import partial

import megatron.core.datasets.utils
from examples.mimo.model_providers import nemotron_moe_vlm, radio_encoder
from examples.mimo.nemotron_vlm.layer_specs import layer_specs
from megatron.core.tensor_parallel import RowParallelLinear

VIT = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 4}
VIT |= {"kv_channels": 8, "ffn_hidden_size": 64}


def small(config_of):
    """The same configuration with the sizes of VIT."""

    def config(*args):
        made = config_of(*args)
        for name, value in VIT.items():
            setattr(made, name, value)
        return made

    return config


def main() -> None:
    """Substitute, then run the program."""
    specs = layer_specs("local")
    # The package has no Makefile for the index builder of .bin data, which is not read here.
    megatron.core.datasets.utils.compile_helpers = lambda: None
    radio_encoder.RADIOViTModel = partial(radio_encoder.RADIOViTModel, force_cpe_eval_mode=True)
    radio_encoder.get_vit_layer_with_transformer_engine_spec = lambda: specs.vit_layer
    nemotron_moe_vlm.radio_vision_config = small(radio_encoder.radio_vision_config)
    nemotron_moe_vlm.TERowParallelLinear = RowParallelLinear
    nemotron_moe_vlm.mamba_stack_spec = specs.hybrid_stack
    runpy.run_module("examples.mimo.pretrain_mimo", run_name="__main__")


if __name__ == "__main__":
    main()
