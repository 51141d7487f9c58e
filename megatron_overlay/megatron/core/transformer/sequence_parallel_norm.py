# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm from PyTorch that train under sequence parallelism.

Under sequence parallelism each tensor-parallel rank normalises only its own tokens, so the gradient
of the norm's weight is a partial sum. Megatron completes it over the tensor-parallel group for each
parameter whose `sequence_parallel` attribute is true; these norms only add that attribute.
"""

import torch

from megatron.core.transformer.transformer_config import TransformerConfig

_NORMS = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


class SequenceParallelNorm:
    """Builds the norm that `config.normalization` names; a class because layer specs need one.

    Args:
        hidden_size: size of the last dimension, which is normalised.
        eps: added to the variance (LayerNorm) or mean square (RMSNorm); `config.layernorm_epsilon`
            if None.

    Raises:
        ValueError: the config asks for another normalization, or for weights centred on zero.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float | None = None
    ) -> torch.nn.Module:
        if config.normalization not in _NORMS:
            raise ValueError(
                f"normalization must be one of {', '.join(_NORMS)} without Transformer Engine, "
                f"not {config.normalization}"
            )
        if config.layernorm_zero_centered_gamma:
            raise ValueError("layernorm_zero_centered_gamma needs Transformer Engine")
        norm = _NORMS[config.normalization](
            hidden_size,
            eps=config.layernorm_epsilon if eps is None else eps,
            dtype=config.params_dtype,
            device=None if config.use_cpu_initialization else torch.cuda.current_device(),
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
