# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A second encoder, of clips of any length: one file, as every encoder of the program is.

Importing it enters the encoder and a preset of both. PyTorch's own layers know no tensor
parallelism, so each of its ranks has the whole encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.encoders import ENCODERS
from examples.mimo.nemotron_vlm.encoders.entry import Configs, Encoder
from examples.mimo.nemotron_vlm.encoders.stage import projector_config, stage_spec
from examples.mimo.nemotron_vlm.model.layer_specs import LayerSpecs
from examples.mimo.nemotron_vlm.model.presets import PRESETS, tiny
from megatron.core.models.mimo.forward.flops import mlp_flops, vit_flops
from megatron.core.models.mimo.setup.initialization import fan_in_normal
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Sound(Encoder):
    """Sizes of a convolution that halves the frames, and of a transformer; frames of a clip are its
    size.
    """

    name = "sound"
    key = "transformer"
    token = 5
    usual = 8
    initial = {"*in_proj_weight": fan_in_normal}

    features: int = 8
    most_frames: int = 8
    layers: int = 1
    hidden: int = 16
    heads: int = 2
    ffn: int = 32

    def rows(self, sizes: np.ndarray) -> np.ndarray:
        """See `Encoder`."""
        return -(-sizes // 2)

    def work(self, sizes: np.ndarray, width: int) -> dict[str, np.ndarray]:
        """See `Encoder`."""
        rows = self.rows(sizes)
        shape = self.layers, self.hidden, self.ffn, 3 * self.features
        mlp = mlp_flops(rows, (self.hidden, self.ffn, width))
        return {
            "vit": vit_flops(rows, rows, *shape).astype(np.int64),
            "gemm": mlp.astype(np.int64),
        }

    def collate(self, parts: Sequence[Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """See `Encoder`; parts are clips float32 [frames, features]."""
        clips = [clip for part in parts for clip in part]
        whole = torch.zeros(self.most_frames, self.features)  # so that all are padded to as many
        frames = pad_sequence([whole, *clips], batch_first=True)[1:]
        return {"frames": frames, "lengths": torch.tensor([len(c) for c in clips]).long()}

    def divided(self) -> dict[str, int]:
        """See `Encoder`."""
        return {"encoder of PyTorch's layers": 1}

    def configs(self, shared: Mapping[str, Any], width: int) -> Configs:
        """See `Encoder`."""
        sizes = {"num_layers": self.layers, "hidden_size": self.hidden}
        encoder = TransformerConfig(num_attention_heads=self.heads, **sizes, **shared)
        projector = projector_config(shared, width, self.ffn, self.heads)
        return {"encoder": encoder, "projector": projector}

    def spec(
        self, configs: Configs, specs: LayerSpecs, groups: ProcessGroupCollection | None
    ) -> ModuleSpec:
        """See `Encoder`."""
        params = {"config": configs["encoder"], "sizes": self, "groups": groups}
        encoder = ModuleSpec(module=SoundEncoder, params=params)
        projector = configs["projector"]
        return stage_spec(self.key, encoder, self.hidden, projector, specs, groups)

    def kept(self, layout: Layout, first: bool = True, last: bool = True) -> float:
        """See `Encoder`; roughly."""
        return self.usual_rows() * (8 * self.hidden + 2 * self.ffn) * (self.layers + 1)

    def reduced(self) -> int:
        """See `Encoder`."""
        return 0


class SoundEncoder(MegatronModule):
    """The encoder's layers; without a clip, it encodes an empty one."""

    def __init__(
        self, config: TransformerConfig, sizes: Sound, groups: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        self.tp_group = groups.tp
        self.conv = nn.Conv1d(sizes.features, sizes.hidden, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                sizes.hidden, sizes.heads, sizes.ffn, dropout=0.0, batch_first=True
            )
            for _ in range(sizes.layers)
        )

    def forward(self, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Map clips ``[n, frames, features]``, of these ``lengths [n]``, to ``[rows, hidden]``."""
        if not len(frames):
            frames, lengths = frames.new_zeros(1, *frames.shape[1:]), lengths.new_ones(1)
        hidden = self.conv(frames.transpose(1, 2)).transpose(1, 2)
        place = torch.arange(hidden.size(1), device=hidden.device)
        is_padding = place >= (lengths[:, None] + 1) // 2
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=is_padding)
        return hidden[~is_padding]


ENCODERS[Sound.name] = Sound
PRESETS["tiny-sound"] = lambda: replace(
    tiny(), name="tiny-sound", encoders=(*tiny().encoders, Sound())
)
