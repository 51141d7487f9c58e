# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Model sizes of the Nemotron VLM: its encoders and the hybrid language model.

A preset is plain data, made by a function or read from a file, and knows nothing of ranks or
devices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.encoders import ENCODERS, Encoder
from examples.mimo.nemotron_vlm.model.encoders.radio import Radio, RadioOfAnySize
from examples.mimo.nemotron_vlm.model.encoders.sound import Sound
from examples.mimo.nemotron_vlm.model.names import IMAGES


@dataclass(frozen=True)
class LanguagePreset:
    """Sizes of the hybrid language model: Mamba-2 (``M``), gated delta net (``G``), attention
    (``*``), MLP (``-``), MoE (``E``). Fields are options of Megatron; sizes of layers that the
    pattern lacks do not matter.
    """

    hybrid_layer_pattern: str
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    num_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    moe_shared_expert_intermediate_size: int
    mamba_num_heads: int
    mamba_head_dim: int
    mamba_num_groups: int
    mamba_state_dim: int
    vocab_size: int
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    ffn_hidden_size: int | None = None
    moe_router_topk_scaling_factor: float = 2.5
    layernorm_epsilon: float = 1e-5


@dataclass(frozen=True)
class VLMPreset:
    """Sizes of a whole model.

    encoders: entries, in the order of the model's modules. seq_length: default number of tokens of
    a sample.
    """

    name: str
    encoders: tuple[Encoder, ...]
    language: LanguagePreset
    seq_length: int = 32

    @property
    def names(self) -> list[str]:
        """Names of the encoders' modules."""
        return [each.name for each in self.encoders]

    @property
    def images(self) -> Radio:
        """The encoder of image tiles, whose sizes the program's own data sets need."""
        return next(each for each in self.encoders if each.name == IMAGES)

    @property
    def is_in_transformers(self) -> bool:
        """Whether transformers' nemotron_h has all kinds of layers: it has no gated delta nets."""
        return "G" not in self.language.hybrid_layer_pattern

    def with_images_of_any_size(
        self, least: int | None = None, most: int | None = None, frame: int | None = None
    ) -> VLMPreset:
        """Return the model that encodes whole images of ``least`` to ``most`` patches, not tiles,
        and frames of about ``frame`` patches; None for the entry's own.
        """
        sizes = {"min_patches": least, "max_patches": most, "clip_patches": frame}
        given = {name: value for name, value in sizes.items() if value is not None}
        images = RadioOfAnySize(**vars(self.images) | given)
        others = (images if each.name == IMAGES else each for each in self.encoders)
        return replace(self, encoders=tuple(others))


def tiny() -> VLMPreset:
    """Sizes for CPUs, divisible by encoder tp=8 and language tp=4, cp=8, pp=4, vpp=2, ep=8."""
    images = Radio(
        **{"layers": 2, "hidden": 64, "heads": 8, "ffn": 128, "projector_ffn": 128},
        **{"patch": 4, "tile": 16, "max_tile": 16, "min_patches": 4, "max_patches": 96},
    )
    return VLMPreset(
        name="tiny",
        encoders=(images,),
        language=LanguagePreset(
            hybrid_layer_pattern="MEM*MEM*",
            hidden_size=64,
            num_attention_heads=8,
            num_query_groups=4,
            kv_channels=8,
            num_experts=8,
            moe_router_topk=2,
            moe_ffn_hidden_size=64,
            moe_shared_expert_intermediate_size=64,
            mamba_num_heads=32,
            mamba_head_dim=4,
            mamba_num_groups=4,
            mamba_state_dim=16,
            vocab_size=64,
        ),
    )


def tiny_omni() -> VLMPreset:
    """``tiny`` with video and sound."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    small = {"num_mel_bins": 16, "subsampling_conv_channels": 8, "conv_kernel_size": 5}
    sound = Sound(layers=2, projector_ffn=64, **sizes, **small)
    images = replace(tiny().images, tubelet=2, clip_patches=16)
    return replace(tiny(), name="tiny-omni", encoders=(images, sound))


def nano_vl_30b_a3b() -> VLMPreset:
    """Published sizes of Nemotron-3-Nano-30B-A3B with RADIO ViT-H on 512×512 tiles."""
    sizes = {"layers": 32, "hidden": 1280, "heads": 16, "ffn": 5120, "projector_ffn": 20480}
    return VLMPreset(
        name="nano-vl-30b-a3b",
        encoders=(Radio(**sizes, patch=16, tile=512, max_tile=2048),),
        language=LanguagePreset(
            hybrid_layer_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            hidden_size=2688,
            num_attention_heads=32,
            num_query_groups=2,
            kv_channels=128,
            num_experts=128,
            moe_router_topk=6,
            moe_ffn_hidden_size=1856,
            moe_shared_expert_intermediate_size=3712,
            mamba_num_heads=64,
            mamba_head_dim=64,
            mamba_num_groups=8,
            mamba_state_dim=128,
            vocab_size=131072,
        ),
        seq_length=8192,
    )


def nano_omni_30b_a3b() -> VLMPreset:
    """Published sizes of Nemotron-3-Nano-Omni-30B-A3B-Reasoning.

    They are its repository's ``config.json``; what that leaves out (RADIO's tokens and epsilon,
    Parakeet's attention without biases), it has from transformers' defaults for it. The published
    model takes whole images, so train it with ``--dynamic-resolution``.
    """
    base = nano_vl_30b_a3b()
    clip = {
        "pixel_mean": (0.48145466, 0.4578275, 0.40821073),
        "pixel_std": (0.26862954, 0.26130258, 0.27577711),
    }
    images = replace(base.images, class_tokens=10, norm_epsilon=1e-6, tubelet=2, **clip)
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "intermediate_size": 4096}
    sound = Sound(layers=24, projector_ffn=4096, **sizes)
    return replace(base, name="nano-omni-30b-a3b", encoders=(images, sound))


def tiny_gdn() -> VLMPreset:
    """``tiny`` with a gated delta net in the place of every second Mamba-2 layer."""
    base = tiny()
    language = replace(
        base.language,
        hybrid_layer_pattern="MEG*MEG*",
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    return replace(base, name="tiny-gdn", language=language)


def nano_vl_30b_a3b_gdn() -> VLMPreset:
    """``nano-vl-30b-a3b`` with every third Mamba-2 layer a gated delta net as wide as Qwen3-Next's.

    No such model is published; it is there to train and to measure one.
    """
    base = nano_vl_30b_a3b()
    pattern = re.sub("(M[^M]*M[^M]*)M", r"\1G", base.language.hybrid_layer_pattern)
    language = replace(base.language, hybrid_layer_pattern=pattern)
    return replace(base, name="nano-vl-30b-a3b-gdn", language=language)


PRESETS: dict[str, Callable[[], VLMPreset]] = {
    "tiny": tiny,
    "tiny-gdn": tiny_gdn,
    "tiny-omni": tiny_omni,
    "nano-vl-30b-a3b": nano_vl_30b_a3b,
    "nano-vl-30b-a3b-gdn": nano_vl_30b_a3b_gdn,
    "nano-omni-30b-a3b": nano_omni_30b_a3b,
}


def find_preset(model: str) -> VLMPreset:
    """Return a preset by its name, or by the path of a file that ``write_preset`` wrote.

    Raises:
        UserError: there is neither.
    """
    if model in PRESETS:
        return PRESETS[model]()
    try:
        read = json.loads(Path(model).read_text())
        read["encoders"] = tuple(
            ENCODERS[name](**{k: tuple(v) if isinstance(v, list) else v for k, v in sizes.items()})
            for name, sizes in read["encoders"].items()
        )
        read["language"] = LanguagePreset(**read["language"])
        return VLMPreset(**read)
    except OSError as error:
        reason = f"no preset and no file; choose from {', '.join(sorted(PRESETS))}, or a model.json"
        raise UserError(f"--model {model}: {reason}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"--model {model}: not a file of model sizes: {error}") from error


def write_preset(preset: VLMPreset, path: Path) -> None:
    """Write a preset, as JSON."""
    encoders = {each.name: asdict(each) for each in preset.encoders}
    path.write_text(json.dumps(asdict(preset) | {"encoders": encoders}, indent=2) + "\n")
