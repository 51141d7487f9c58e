# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A model of transformers, on the inputs that the program's encoders take."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import transformers
from einops import rearrange

from conversion.nemotron_h import TIME_STEP_MIN
from conversion.sources import LANGUAGE, config_of
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.encoders.radio.entry import Radio

MAY_LACK = re.compile(
    "lambda1$|summary_idxs$|num_batches_tracked$|norm_(mean|std)$"
    "|feature_extractor|video_patch_projection"
)
"""Tensors that the program's models do not have; transformers fills them as they have to be. The
last embeds video, which is refused for such a model."""


def their_model(directory: Path, as_ours: bool = False):
    """Load a whole VLM or a language model.

    Args:
        as_ours: in fp32, with Mamba-2's time steps as they are.

    Raises:
        UserError: the directory lacks tensors.
    """
    from transformers.models.nemotron_h_omni import NemotronH_Omni_Reasoning_V3

    transformers.logging.set_verbosity_error()  # its hints about kernels; lacks are looked for
    transformers.logging.disable_progress_bar()
    config = config_of(directory)
    is_language = config.model_type == LANGUAGE.model_type
    kind = transformers.NemotronHForCausalLM if is_language else NemotronH_Omni_Reasoning_V3
    if as_ours:
        getattr(config, "text_config", config).time_step_min = TIME_STEP_MIN
    dtype = torch.float32 if as_ours else "auto"
    how = {"config": config, "dtype": dtype, "output_loading_info": True}
    model, found = kind.from_pretrained(directory, **how)
    if lacking := [name for name in found["missing_keys"] if not MAY_LACK.search(name)]:
        raise UserError(f"{directory} lacks {', '.join(lacking)}")
    return model.eval()


def embedded(model, ids: torch.Tensor, rows: dict[int, list[torch.Tensor]]) -> torch.Tensor:
    """Return embeddings of tokens [1, n, hidden].

    Args:
        ids: [1, n].
        rows: encoders' rows, in the places of these tokens.
    """
    found = model.get_input_embeddings()(ids)
    for token, parts in rows.items():
        if parts:
            found[ids == token] = torch.cat(parts).to(found.dtype)
    return found


def their_rows(model, images: Radio, made: torch.Tensor) -> torch.Tensor:
    """Return the rows that transformers' encoder makes of an input.

    Args:
        images: the program's encoder of images.
        made: patches of an image or a clip, as `PatchGrids` and `ClipGrids` cut them, or a sound.
    """
    if made.ndim == 1:
        bins = model.config.audio_config.num_mel_bins
        heard = transformers.ParakeetFeatureExtractor(bins)([made.numpy()], sampling_rate=16000)
        given = heard["input_features"], heard["attention_mask"]
        return model.get_audio_features(*given).pooler_output
    mean, std = (torch.tensor(v)[:, None, None] for v in (images.pixel_mean, images.pixel_std))
    if made.ndim == 4:
        cut = "n h w (t c y x) -> n t c (h y) (w x)"
        sides = {"t": images.tubelet, "y": images.patch, "x": images.patch}
        pixels = (rearrange(made, cut, **sides) / 255 - mean) / std
        return torch.cat(list(model.get_video_features(pixels.flatten(1, 2)[None]).pooler_output))
    mean, std = (each.flatten().repeat_interleave(images.patch**2) for each in (mean, std))
    patches, grid = (made.flatten(0, 1) / 255 - mean) / std, torch.tensor([made.shape[:2]])
    return model.get_image_features(patches, grid).pooler_output[0]
