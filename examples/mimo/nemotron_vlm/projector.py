# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The projector between encoder and language model: RMSNorm and a squared-ReLU MLP."""

from __future__ import annotations

import torch

from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class NormedProjector(MegatronModule):
    """Project encoder features [n, input_size] to the language model's width [n, H].

    Args:
        config: of the MLP; ``hidden_size`` is the language model's.
        norm: norm class, built over the input features.
        submodules: the MLP's linear layers.
        input_size: features of one token.
        pg_collection: the encoder's process groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        norm: type,
        submodules: MLPSubmodules,
        input_size: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        self.norm = norm(config=config, hidden_size=input_size, eps=config.layernorm_epsilon)
        self.mlp = MultimodalProjector(
            config, submodules, "mlp", input_size, pg_collection=pg_collection
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map [n, input_size] to [n, H]."""
        return self.mlp(self.norm(features))
