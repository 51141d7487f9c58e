# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The projector of Nemotron's encoders: RMSNorm and a squared-ReLU MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from examples.mimo.nemotron_vlm.encoders.hugging_face import Files, Part, Table, TensorRows
from examples.mimo.nemotron_vlm.model.layer_specs import LayerSpecs
from megatron.core.activations import squared_relu
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


class NormedProjector(MegatronModule):
    """RMSNorm and a squared-ReLU MLP, from encoder features [n, input_size] to [n, H].

    Args:
        config: configuration of the MLP; ``hidden_size`` is the language model's.
        norm: norm class, built over the input features.
        submodules: the MLP's linear layers.
        input_size: features of one row.
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


def projector_config(
    shared: Mapping[str, Any], width: int, ffn: int, heads: int
) -> TransformerConfig:
    """Make a projector's configuration.

    Args:
        shared: fields from the language model and the layout.
        width: the language model's hidden size.
        ffn: the inner width.
        heads: any number that tp divides, for Megatron's check.
    """
    return TransformerConfig(
        num_layers=1,
        hidden_size=width,
        num_attention_heads=heads,
        kv_channels=1,
        ffn_hidden_size=ffn,
        normalization="RMSNorm",
        activation_func=squared_relu,
        add_bias_linear=False,
        **shared,
    )


def projector_spec(
    config: TransformerConfig,
    specs: LayerSpecs,
    input_size: int,
    groups: ProcessGroupCollection | None,
) -> ModuleSpec:
    """Return the spec of a `NormedProjector`."""
    params = dict(
        config=config,
        norm=specs.projector_norm,
        submodules=specs.projector_mlp,
        input_size=input_size,
        pg_collection=groups,
    )
    return ModuleSpec(module=NormedProjector, params=params)


@dataclass(frozen=True)
class ProjectorPart(Part):
    """A projector in Hugging Face models; its entry has the inner width as ``projector_ffn``.

    theirs: names of the norm's weight and the linear layers'. width: field of ``config`` that has
    the inner width.
    """

    theirs: tuple[str, str, str] = ("0.weight", "1.weight", "3.weight")
    width: str = "projector_hidden_size"

    def sizes(self, base: Any, config: Any, files: Files, outer: str, tile: int | None) -> Any:
        """See `Part`."""
        if config:
            return replace(base, projector_ffn=getattr(config, self.width))
        inner = files.shapes.get(outer + self.theirs[1])
        return replace(base, projector_ffn=inner[0]) if inner else base

    def table(self, _sizes: Any) -> Table:
        """See `Part`."""
        linear = (f"mlp.encoder.linear_fc{number}.weight" for number in (1, 2))
        pairs = zip(("norm.weight", *linear), self.theirs, strict=True)
        return {ours: (TensorRows(theirs),) for ours, theirs in pairs}
