# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The entry of images: RADIO ViT, pixel shuffle and projector, on square tiles of one size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.model.encoders.entry import Configs, Encoder
from examples.mimo.nemotron_vlm.model.encoders.hugging_face import Part
from examples.mimo.nemotron_vlm.model.encoders.radio.tiles import RADIOEncoderWrapper
from examples.mimo.nemotron_vlm.model.encoders.radio.weights import RadioPart
from examples.mimo.nemotron_vlm.model.encoders.stage import (
    ProjectorPart,
    projector_config,
    stage_spec,
)
from examples.mimo.nemotron_vlm.model.layer_specs import LayerSpecs
from examples.mimo.nemotron_vlm.model.names import IMAGE, IMAGES
from megatron.core.models.mimo.forward.flops import mlp_flops, vit_flops
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Radio(Encoder):
    """Sizes of the RADIO ViT. A tile is a square image of ``tile`` × ``tile`` pixels, 3 channels.

    projector_ffn: the projector's inner width. pixel_mean, pixel_std: mean and deviation by
    channel, for normalizing pixels in [0, 1]. min_patches, max_patches: of an image that is encoded
    whole, with dynamic resolution (any_size.py). tubelet: frames of a clip that are embedded
    together, by an embedder of their own; 1 is a model without it. clip_patches: of a frame, about.
    """

    name = IMAGES
    takes_fp8 = True
    key = "radio"
    token = IMAGE
    plural = "tiles"
    module: ClassVar[type] = RADIOEncoderWrapper

    layers: int
    hidden: int
    heads: int
    ffn: int
    patch: int
    tile: int
    max_tile: int
    projector_ffn: int
    class_tokens: int = 8
    pixel_shuffle: int = 2
    norm_epsilon: float = 1e-5
    pixel_mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    pixel_std: tuple[float, ...] = (1.0, 1.0, 1.0)
    min_patches: int = 1024
    max_patches: int = 13312
    tubelet: int = 1
    clip_patches: int = 1024

    @property
    def tokens_per_tile(self) -> int:
        """Rows that one tile becomes in the language model's sequence."""
        return (self.tile // self.patch // self.pixel_shuffle) ** 2

    @property
    def output_size(self) -> int:
        """Features of one of these rows before the projector."""
        return self.hidden * self.pixel_shuffle**2

    @property
    def patches(self) -> int:
        """Patches of a tile."""
        return (self.tile // self.patch) ** 2

    def count_patches(self, sizes: np.ndarray) -> np.ndarray:
        """Return the patches of inputs, int64 [inputs]; tiles have one size."""
        return np.full(len(sizes), self.patches)

    def sequences(self, sizes: np.ndarray) -> np.ndarray:
        """Return the sequences that attend to themselves alone, int64 [inputs]."""
        return np.ones(len(sizes), np.int64)

    def features(self, sizes: np.ndarray) -> np.ndarray:
        """Return the numbers that are embedded of each patch, int64 [inputs]."""
        return np.full(len(sizes), 3 * self.patch**2)

    def tokens(self, sizes: np.ndarray) -> np.ndarray:
        """Return the patches and class tokens of inputs, int64 [inputs]."""
        return self.count_patches(sizes) + self.class_tokens * self.sequences(sizes)

    def rows(self, sizes: np.ndarray) -> np.ndarray:
        return self.count_patches(sizes) // self.pixel_shuffle**2

    def work(self, sizes: np.ndarray, width: int) -> dict[str, np.ndarray]:
        count, shape = self.sequences(sizes), (self.layers, self.hidden, self.ffn)
        of_one = self.count_patches(sizes) // count, self.tokens(sizes) // count
        vit = count * vit_flops(*of_one, *shape, self.features(sizes))
        mlp = mlp_flops(self.rows(sizes), (self.output_size, self.projector_ffn, width))
        return {"vit": vit.astype(np.int64), "gemm": mlp.astype(np.int64)}

    def collate(self, parts: Sequence[Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """See `Encoder`; parts are tiles uint8 [n, 3, H, W]."""
        none = torch.empty(0, 3, self.tile, self.tile, dtype=torch.uint8)
        return {"tiles": torch.cat([none, *parts])}

    def divided(self) -> dict[str, int]:
        return {
            "attention heads": self.heads,
            "features": self.hidden,
            "FFN rows": self.ffn,
            "projector rows": self.projector_ffn,
        }

    def configs(self, shared: Mapping[str, Any], width: int) -> Configs:
        encoder = TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            ffn_hidden_size=self.ffn,
            normalization="LayerNorm",
            layernorm_epsilon=self.norm_epsilon,
            activation_func=F.gelu,
            add_bias_linear=True,
            **shared,
        )
        projector = projector_config(shared, width, self.projector_ffn, self.heads)
        return {"encoder": encoder, "projector": projector}

    def spec(
        self, configs: Configs, specs: LayerSpecs, groups: ProcessGroupCollection | None
    ) -> ModuleSpec:
        radio = dict(config=configs["encoder"], layer_spec=specs.vit_layer, sizes=self)
        encoder = ModuleSpec(module=self.module, params=radio | {"pg_collection": groups})
        projector = configs["projector"]
        return stage_spec(self.key, encoder, self.output_size, projector, specs, groups)

    def kept(
        self, sizes: np.ndarray, layout: Layout, first: bool = True, last: bool = True
    ) -> np.ndarray:
        layer = 4 * self.hidden + 4 + (4 * self.hidden + 2 * self.ffn + self.heads) / layout.tp
        row = 3 * self.output_size + 1 + 2 * self.projector_ffn / layout.tp
        pixels = self.count_patches(sizes) * self.features(sizes) * first
        kept = self.tokens(sizes) * layer * self.layers / layout.pp
        return kept + pixels + self.rows(sizes) * row * last

    def reduced(self, sizes: np.ndarray) -> np.ndarray:
        return self.tokens(sizes) * self.hidden

    def parts(self) -> tuple[Part, ...]:
        module = f"modality_submodules.{self.name}."
        ours = f"{module}encoders.{self.key}.radio."
        encoder = RadioPart("encoder", ours, "vision_model.radio_model.", "vision_config")
        return encoder, ProjectorPart("projector", f"{module}input_projections.0.", "mlp1.")
