# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Translation of the language model, Hugging Face's NemotronH."""

from dataclasses import replace
from typing import Any

from examples.mimo.nemotron_vlm.model.encoders.hugging_face import (
    Files,
    Part,
    Table,
    TensorRows,
    check_values,
    interleaved,
)
from examples.mimo.nemotron_vlm.model.presets import LanguagePreset

EXPECTED = {
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,  # of the norm in our Mamba-2 layers, whatever --norm-epsilon says
    "mamba_hidden_act": "silu",
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "moe_latent_size": None,
    "n_group": 1,
    "num_nextn_predict_layers": 0,
    "residual_in_fp32": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
}
"""Fields of a NemotronHConfig for which our model supports one value."""

TIME_STEP_MIN = 1e-12
"""Transformers raises Mamba-2's time steps to ``time_step_min``; ours may have any."""

TOP = {
    "embedding.word_embeddings.weight": "backbone.embeddings.weight",
    "decoder.final_norm.weight": "backbone.norm_f.weight",
    "output_layer.weight": "lm_head.weight",
}

LAYERS = {
    "M": {
        "mixer.in_proj.layer_norm_weight": "norm.weight",
        "mixer.A_log": "mixer.A_log",
        "mixer.D": "mixer.D",
        "mixer.dt_bias": "mixer.dt_bias",
        "mixer.norm.weight": "mixer.norm.weight",
        "mixer.out_proj.weight": "mixer.out_proj.weight",
    },
    "*": {
        "self_attention.linear_qkv.layer_norm_weight": "norm.weight",
        "self_attention.linear_proj.weight": "mixer.o_proj.weight",
    },
    "-": {
        "mlp.linear_fc1.layer_norm_weight": "norm.weight",
        "mlp.linear_fc1.weight": "mixer.up_proj.weight",
        "mlp.linear_fc2.weight": "mixer.down_proj.weight",
    },
    "E": {
        "pre_mlp_layernorm.weight": "norm.weight",
        "mlp.router.weight": "mixer.gate.weight",
        "mlp.router.expert_bias": "mixer.gate.e_score_correction_bias",
        "mlp.shared_experts.linear_fc1.weight": "mixer.shared_experts.up_proj.weight",
        "mlp.shared_experts.linear_fc2.weight": "mixer.shared_experts.down_proj.weight",
        "mlp.experts.experts.linear_fc1.weight[{}]": "mixer.experts.{}.up_proj.weight",
        "mlp.experts.experts.linear_fc2.weight[{}]": "mixer.experts.{}.down_proj.weight",
    },
}
"""Tensors that differ in name only, by the layer's symbol; both names are below ``layers.N``, and
``{}`` is the number of an expert."""

SIZES = {
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "layernorm_epsilon": "layer_norm_epsilon",
    "ffn_hidden_size": "intermediate_size",
    "num_experts": "n_routed_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "mamba_num_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_num_groups": "n_groups",
    "mamba_state_dim": "ssm_state_size",
}
"""Fields of a preset and of a NemotronHConfig."""


class LanguagePart(Part):
    """The language model."""

    expected, same = EXPECTED, SIZES

    def sizes(self, base: LanguagePreset, config: Any, files: Files) -> LanguagePreset:
        """See `Part`."""
        # With one expert per token, ours does not normalize its score.
        check_values("the router", config, {"norm_topk_prob": config.num_experts_per_tok > 1})
        sizes = super().sizes(base, config, files)
        pattern = config.hybrid_override_pattern
        ffn = sizes.ffn_hidden_size if "-" in pattern else None
        return replace(sizes, hybrid_layer_pattern=pattern, ffn_hidden_size=ffn)

    def fields(self, sizes: LanguagePreset) -> dict[str, Any]:
        """See `Part`."""
        return {
            **super().fields(sizes),
            "model_type": "nemotron_h",
            "hybrid_override_pattern": sizes.hybrid_layer_pattern,
            "intermediate_size": sizes.ffn_hidden_size or sizes.hidden_size,  # without "-", any
            "time_step_min": TIME_STEP_MIN,
            "norm_topk_prob": sizes.moe_router_topk > 1,
        }

    def table(self, sizes: LanguagePreset) -> Table:
        """See `Part`."""
        table = {ours: (TensorRows(theirs),) for ours, theirs in TOP.items()}
        for number, symbol in enumerate(sizes.hybrid_layer_pattern):
            ours, theirs = f"decoder.layers.{number}.", f"backbone.layers.{number}."
            for name, other in LAYERS[symbol].items():
                for expert in range(sizes.num_experts if "{}" in name else 1):
                    source = TensorRows(theirs + other.format(expert))
                    table[ours + name.format(expert)] = (source,)
            if symbol == "M":
                table |= _mamba(sizes, ours + "mixer.", theirs + "mixer.")
            elif symbol == "*":
                heads = (sizes.num_attention_heads, sizes.num_query_groups, sizes.kv_channels)
                names = tuple(f"{theirs}mixer.{each}_proj.weight" for each in "qkv")
                qkv = interleaved([TensorRows(name) for name in names], *heads)
                table[ours + "self_attention.linear_qkv.weight"] = qkv
        return table


def _mamba(sizes: LanguagePreset, ours: str, theirs: str) -> Table:
    """Return the table of a mixer; ours saves z, x, B, C and dt apart, as TP splits each."""
    inner = sizes.mamba_num_heads * sizes.mamba_head_dim
    state = sizes.mamba_num_groups * sizes.mamba_state_dim
    counts = {"z": inner, "x": inner, "B": state, "C": state, "dt": sizes.mamba_num_heads}
    convolved = ("x", "B", "C")
    names = {"in_proj.weight": counts, "conv1d.weight": convolved, "conv1d.bias": convolved}
    table = {}
    for name, parts in names.items():
        start = 0
        for part in parts:
            table[f"{ours}{name}.{part}"] = (TensorRows(theirs + name, start, counts[part]),)
            start += counts[part]
    return table
