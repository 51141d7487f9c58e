# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""State passing's options of TransformerConfig; imports nothing of Megatron."""

HEADWISE, CHUNKWISE = "headwise", "chunkwise"
ZIGZAG, CONTIGUOUS = "zigzag", "contiguous"


def check_options(config) -> None:
    """Refuse unknown values of the options, and values that exclude each other.

    Raises:
        ValueError: the message names the option and its values.
    """
    for name, known in (
        ("linear_cp_mode", (HEADWISE, CHUNKWISE)),
        ("linear_cp_layout", (ZIGZAG, CONTIGUOUS)),
        ("attention_cp_layout", (ZIGZAG, CONTIGUOUS)),
    ):
        if getattr(config, name) not in known:
            raise ValueError(f"{name} must be one of {known}, not {getattr(config, name)!r}")
    if config.linear_cp_layout == CONTIGUOUS and not passes_states(config):
        raise ValueError(
            f"linear_cp_layout={CONTIGUOUS!r} needs linear_cp_mode={CHUNKWISE!r}, "
            f"not {config.linear_cp_mode!r}: heads are spread from zigzag tokens"
        )
    if config.attention_cp_layout == CONTIGUOUS and config.context_parallel_size > 1:
        raise ValueError(
            f"attention_cp_layout={CONTIGUOUS!r} takes one CP rank, not "
            f"{config.context_parallel_size}: attention over several is balanced by {ZIGZAG} tokens"
        )
    if passes_states(config) and config.experimental_attention_variant == "gdn2":
        raise ValueError(f"linear_cp_mode={CHUNKWISE!r} does not take gdn2 layers")
    if passes_states(config) and config.mamba_training_ssm_states_dtype is not None:
        raise ValueError(
            f"linear_cp_mode={CHUNKWISE!r} takes no mamba_training_ssm_states_dtype: "
            "its states between chunks have the dtype of the activations"
        )


def passes_states(config) -> bool:
    """Whether recurrent layers pass states between CP ranks, instead of splitting their heads."""
    return config.linear_cp_mode == CHUNKWISE


def head_parallel_size(config) -> int:
    """Number of ranks over which a recurrent layer splits its heads, besides TP."""
    return 1 if passes_states(config) else config.context_parallel_size
