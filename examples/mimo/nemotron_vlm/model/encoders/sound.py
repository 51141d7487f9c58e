# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The entry of sound: Parakeet, a module of transformers, and projector, on sounds of any length.

A sound is a waveform, from which the loading processes compute log-mel frames. Parakeet's layers
know no tensor parallelism, so each rank has the whole encoder. It has no dropout, and its batch
norms always use their running statistics, also in training, and do not update them: a batch's own
would depend on how ranks share it. They are 0 and 1 in a new model, or a pretrained model's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import Layout
from examples.mimo.nemotron_vlm.model.encoders.entry import Configs, Encoder
from examples.mimo.nemotron_vlm.model.encoders.hugging_face import (
    Part,
    Table,
    TensorRows,
)
from examples.mimo.nemotron_vlm.model.encoders.stage import (
    ProjectorPart,
    projector_config,
    stage_spec,
)
from examples.mimo.nemotron_vlm.model.layer_specs import LayerSpecs
from examples.mimo.nemotron_vlm.model.media_sizes import (
    HOP,
    SAMPLING_RATE,
    SHORTEST,
    rows_of_sounds,
)
from examples.mimo.nemotron_vlm.model.names import SOUND
from megatron.core.models.mimo.forward.flops import mlp_flops
from megatron.core.models.mimo.setup.initialization import Draw, filled, normal
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.token_layout import copied_to
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

KERNEL = 3
"""Side of the kernels that halve the frames."""

FINENESS = 3
"""Binary digits of the lengths to which sounds are padded: four lengths in an octave."""


@dataclass(frozen=True)
class Sound(Encoder):
    """Sizes of a ParakeetEncoderConfig, by its names, but ``layers`` is its ``num_hidden_layers``.

    The size of a sound is its number of samples. projector_ffn: the projector's inner width.
    """

    name = SOUND
    key = "parakeet"
    token = 5
    usual = 10 * SAMPLING_RATE
    plural = "sounds"

    layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    projector_ffn: int
    num_mel_bins: int = 128
    subsampling_conv_channels: int = 256
    subsampling_factor: int = 8
    conv_kernel_size: int = 9
    attention_bias: bool = False
    convolution_bias: bool = False
    scale_input: bool = False

    @property
    def initial(self) -> Mapping[str, Draw]:
        """See `Encoder`; the last dim of a convolution's weight is not all of its fan in."""
        return {
            "*.subsampling.layers.[369].weight": normal(self.subsampling_conv_channels**-0.5),
            "*.subsampling.layers.*.weight": normal(1 / KERNEL),
            "*.pointwise_conv?.weight": normal(self.hidden_size**-0.5),
            "*.norm_*.weight": filled(1),
            "*.running_var": filled(1),
            "*.running_mean": filled(0),
            "*.bias_[uv]": filled(0),
        }

    def rows(self, sizes: np.ndarray) -> np.ndarray:
        return rows_of_sounds(sizes, self.subsampling_factor)

    def work(self, sizes: np.ndarray, width: int) -> dict[str, np.ndarray]:
        rows, hidden, channels = self.rows(sizes), self.hidden_size, self.subsampling_conv_channels
        weights = 4 * hidden * self.intermediate_size + 9 * hidden**2
        weights += hidden * self.conv_kernel_size
        layer = rows * weights + 4 * rows**2 * hidden  # keys, positions (twice as many), values
        features = channels * self.num_mel_bins // self.subsampling_factor
        # Each halving leaves a quarter of the places, the last `features / channels` of a row.
        first = self.subsampling_factor**2 / 4
        halvings = first * KERNEL**2 + (first - 1) / 3 * (channels + KERNEL**2)
        encoder = self.layers * layer + rows * features * (halvings + hidden)
        mlp = mlp_flops(rows, (hidden, self.projector_ffn, width))
        return {"vit": (6 * encoder).astype(np.int64), "gemm": mlp.astype(np.int64)}

    def collate(
        self, parts: Sequence[Sequence[torch.Tensor]]
    ) -> dict[str, torch.Tensor | np.ndarray]:
        """See `Encoder`; parts are sounds, float32 [samples]."""
        sounds = [self.log_mel(sound) for part in parts for sound in part]
        frames = torch.cat([torch.empty(0, self.num_mel_bins), *sounds])
        lengths = np.array([len(sound) for sound in sounds], dtype=np.int64)
        return {"frames": frames, "lengths": lengths}

    def log_mel(self, sound: torch.Tensor) -> torch.Tensor:
        """Return a sound's frames, float32 [frames, mel bins]; the last is zero.

        Raises:
            ValueError: the sound is too short.
        """
        if len(sound) < SHORTEST:
            raise ValueError(f"a sound of {len(sound)} samples: give {SHORTEST} or more")
        made = _extractor(self.num_mel_bins)(
            sound.numpy(), sampling_rate=SAMPLING_RATE, return_tensors="pt"
        )
        return made.input_features[0]

    def divided(self) -> dict[str, int]:
        return {"encoder of transformers": 1}

    def staged(self) -> dict[str, int]:
        return self.divided()

    def configs(self, shared: Mapping[str, Any], width: int) -> Configs:
        """See `Encoder`.

        Raises:
            UserError: transformers is not installed.
        """
        if find_spec("transformers") is None:
            raise UserError("sound needs transformers: pip install 'transformers>=5.23'")
        sizes = {"num_layers": self.layers, "hidden_size": self.hidden_size}
        heads = self.num_attention_heads
        encoder = TransformerConfig(num_attention_heads=heads, **sizes, **shared)
        projector = projector_config(shared, width, self.projector_ffn, heads)
        return {"encoder": encoder, "projector": projector}

    def spec(
        self, configs: Configs, specs: LayerSpecs, groups: ProcessGroupCollection | None
    ) -> ModuleSpec:
        params = {"config": configs["encoder"], "sizes": self, "groups": groups}
        encoder = ModuleSpec(module=SoundEncoder, params=params)
        projector = configs["projector"]
        return stage_spec(self.key, encoder, self.hidden_size, projector, specs, groups)

    def kept(
        self, sizes: np.ndarray, layout: Layout, first: bool = True, last: bool = True
    ) -> np.ndarray:
        rows, hidden, factor = self.rows(sizes), self.hidden_size, self.subsampling_factor
        layer = 22 * hidden + 4 * self.intermediate_size + (self.num_attention_heads + 1) * rows
        # The first halving keeps its output, the others input and output, each of a quarter.
        halved = self.subsampling_conv_channels * (5 * factor / 12 + 1 / (3 * factor))
        once = self.num_mel_bins * (halved + factor) + 5 * hidden + 2 * self.projector_ffn
        return rows * (self.layers * layer + once)

    def reduced(self, sizes: np.ndarray) -> np.ndarray:
        return np.zeros_like(sizes)

    def parts(self) -> tuple[Part, ...]:
        module = f"modality_submodules.{self.name}."
        ours = f"{module}encoders.{self.key}.encoder."
        encoder = SoundPart("sound encoder", ours, "sound_encoder.encoder.", "audio_config")
        return encoder, ProjectorPart(
            "sound projector",
            f"{module}input_projections.0.",
            "sound_projection.",
            "audio_config",
            tensors=("norm.weight", "linear1.weight", "linear2.weight"),
            width="projection_hidden_size",
        )


@functools.cache
def _extractor(mel_bins: int):
    from transformers import ParakeetFeatureExtractor

    return ParakeetFeatureExtractor(mel_bins, SAMPLING_RATE, HOP)


def parakeet(sizes: Sound, dtype: torch.dtype | None = None) -> nn.Module:
    """Make transformers' encoder without its initial weights; its attention is `attend`."""
    from transformers import AttentionInterface, AutoModel, ParakeetEncoderConfig
    from transformers.initialization import no_init_weights

    AttentionInterface.register(attend.__name__, attend)
    config = ParakeetEncoderConfig(num_hidden_layers=sizes.layers, **asdict(sizes))
    with no_init_weights():
        encoder = AutoModel.from_config(config, dtype=dtype, attn_implementation=attend.__name__)
    for module in encoder.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.num_batches_tracked = None  # nothing is tracked
    return encoder


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    own: torch.Tensor,
    real: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to a sound's own rows alone, as transformers does to those of one without padding.

    A sound's last row may come from the last frame alone, which is not real. No row attends to this
    one, which takes the mean over all rows; in transformers over the padding's, too. It is the mean
    of equal scores here, since kernels overflow where all are the lowest number.

    Args:
        query, key, value: [sounds, heads, rows, channels].
        attention_mask: terms of relative positions [sounds, heads, rows, rows], the lowest number
            where a row or a key is not real.
        own, real: bool [sounds, rows]: rows that are no padding, and those from real frames.
    """
    unreal = ~real[:, None, :, None]
    bias = attention_mask.masked_fill(unreal, 0).masked_fill(~own[:, None, None], -math.inf)
    output = F.scaled_dot_product_attention(
        query.masked_fill(unreal, 0), key, value, bias, scale=scaling
    )
    return output.transpose(1, 2), None


class SoundEncoder(MegatronModule):
    """Parakeet on sounds one after the other; without any, it encodes a blank one.

    The host has the sounds' lengths, so no forward waits for the device.
    """

    has_few_inputs = True
    """See `EncoderStage.runs_on_every_rank`."""

    def __init__(
        self, config: TransformerConfig, sizes: Sound, groups: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        self.tp_group = groups.tp
        self.factor = sizes.subsampling_factor
        self.encoder = parakeet(sizes, config.params_dtype).eval()

    def train(self, mode: bool = True) -> SoundEncoder:
        """Keep transformers' encoder in evaluation: running statistics, and no dropout."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, frames: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
        """Encode sounds.

        Args:
            frames: [sum of lengths, mel bins].
            lengths: frames of each sound, of which the last is not real; int64 [sounds].

        Returns:
            [rows, hidden], those of all sounds.
        """
        if not len(lengths):
            lengths = np.array([SHORTEST // HOP + 1])
            frames = frames.new_zeros(lengths[0], frames.size(1))
        sounds = frames.to(self.config.params_dtype).split(lengths.tolist())
        padded = pad_sequence(sounds, batch_first=True)
        # cuDNN looks for kernels anew for each length, for 80 ms in all: there are few lengths.
        step = 1 << max(padded.size(1).bit_length() - FINENESS, 0)
        padded = F.pad(padded, (0, 0, 0, -padded.size(1) % step))
        counts = copied_to(frames.device, torch.from_numpy(lengths))[:, None]
        places = torch.arange(padded.size(1), device=frames.device)
        firsts = places[:: self.factor]  # a row comes from so many frames
        hidden = self.encoder(
            padded,
            attention_mask=places < counts - 1,
            own=firsts < counts,
            real=firsts < counts - 1,
        ).last_hidden_state
        rows = -(-lengths // self.factor)
        return torch.cat([sound[:count] for sound, count in zip(hidden, rows, strict=True)])


class SoundPart(Part):
    """Parakeet, by transformers' names in both models."""

    expected = {
        "hidden_act": "silu",
        "projection_bias": False,
        "subsampling_conv_kernel_size": KERNEL,
        "subsampling_conv_stride": 2,
    }
    same = {each.name: each.name for each in fields(Sound) if each.name != "projector_ffn"}
    same["layers"] = "num_hidden_layers"
    unneeded = ("feature_extractor.*", "layers.*.conv.norm.num_batches_tracked")

    def table(self, sizes: Sound) -> Table:
        with torch.device("meta"):
            names = parakeet(sizes).state_dict()
        return {name: (TensorRows(name),) for name in names}
