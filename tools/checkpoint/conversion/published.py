# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories of whole VLMs: the model's parts, their sizes, and their tensors."""

import fnmatch
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from conversion.nemotron_h import LanguagePart
from conversion.rows import Shape, Translation, differences, refuse
from conversion.tensor_files import TensorFiles
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.encoders.hugging_face import Part, check_values
from examples.mimo.nemotron_vlm.model.presets import VLMPreset

VLM = "nemotron_h_omni"
"""``model_type`` of a VLM's configuration."""

RELEASED = "NemotronH_Nano_Omni_Reasoning_V3"
"""``model_type`` of the released VLM's configuration, which AutoConfig does not know."""

LANGUAGE = LanguagePart("language", "language_model.", "language_model.", "text_config")


def parts_of(preset: VLMPreset) -> dict[Part, str | None]:
    """Return the parts of a model with the encoder of each; None for the language model."""
    return {LANGUAGE: None} | {
        part: encoder.name for encoder in preset.encoders for part in encoder.parts()
    }


def sizes_of(preset: VLMPreset, encoder: str | None) -> Any:
    """Return the sizes of an encoder, or of the language model (None)."""
    return next((each for each in preset.encoders if each.name == encoder), preset.language)


def with_sizes(preset: VLMPreset, encoder: str | None, sizes: Any) -> VLMPreset:
    """Return a model with other sizes of an encoder, or of the language model (None)."""
    if encoder is None:
        return replace(preset, language=sizes)
    others = (sizes if each.name == encoder else each for each in preset.encoders)
    return replace(preset, encoders=tuple(others))


def translation_of(
    parts: Iterable[Part], preset: VLMPreset, shapes: Mapping[str, Shape]
) -> Translation:
    """Return the translation of parts; ``shapes`` has our whole model's tensors."""
    parts = {part: encoder for part, encoder in parts_of(preset).items() if part in parts}
    table = {
        part.ours + name: tuple(replace(row, name=part.theirs + row.name) for row in rows)
        for part, encoder in parts.items()
        for name, rows in part.table(sizes_of(preset, encoder)).items()
    }
    prefixes = tuple(part.ours for part in parts)
    return Translation(table, {n: shape for n, shape in shapes.items() if n.startswith(prefixes)})


class Published:
    """A directory of a whole VLM, with or without its tensors.

    parts: the parts of ``base`` that it has. preset: their sizes, and those of ``base`` for the
    others.

    Raises:
        UserError: the directory has no such model, or one with a size or option that ours does not
            support; the message names it.
    """

    def __init__(self, directory: Path, base: VLMPreset, may_lack_tensors: bool = False) -> None:
        self.files = TensorFiles(directory, may_lack_tensors)
        try:
            config = config_of(directory)
        except (ValueError, OSError, KeyError) as error:
            raise UserError(f"{directory}/config.json: {error}") from error
        if config.model_type != VLM:
            raise UserError(
                f"{directory}/config.json: model_type is {config.model_type}, wanted {VLM}"
            )
        check_values("the VLM", config, {"downsample_ratio": 0.5})
        if config.force_image_size:
            config.vision_config.image_size = config.force_image_size
        self.parts: list[Part] = []
        self.preset = replace(base, name="converted")
        for part, encoder in parts_of(base).items():
            described = getattr(config, part.config) if part.config else config
            if described is not None:  # a VLM may have no sound
                self.parts.append(part)
                sizes = part.sizes(sizes_of(self.preset, encoder), described, self.files)
                self.preset = with_sizes(self.preset, encoder, sizes)

    def check(self, translation: Translation, leave_out: list[str]) -> list[str]:
        """Check that the files have the tensors that the model needs, and no others.

        Args:
            leave_out: patterns of names that are not converted.

        Returns:
            Names of the files' tensors that the model does not have.

        Raises:
            UserError: tensors are missing, surplus or misshapen; the message lists them. Or
                ``leave_out`` matches tensors that the model has.
        """
        wanted, found = translation.shapes, self.files.shapes
        dropped = {*matching(found, leave_out)}
        dropped = dropped.union(*(part.not_held(self.files) for part in self.parts))
        if needed := sorted(dropped & wanted.keys()):
            raise UserError(f"--leave-out fits what the model has: {', '.join(needed)}")
        found = {name: shape for name, shape in found.items() if name not in dropped}
        refuse(differences(wanted, found, self.files.directory))
        return sorted(dropped)


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the names that match any of the patterns."""
    patterns = list(patterns)
    return [name for name in names if any(fnmatch.fnmatchcase(name, each) for each in patterns)]


def config_of(directory: Path) -> Any:
    """Read a directory's configuration, as transformers' own class."""
    from transformers import AutoConfig
    from transformers.models.nemotron_h_omni import NemotronH_Omni_Reasoning_V3_Config

    read = json.loads((directory / "config.json").read_text())
    if read.get("model_type") != RELEASED:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    read["model_type"] = VLM
    if read.get("sound_config"):
        read["sound_config"].pop("model_type", None)  # "parakeet", which transformers 5.24 refuses
    return NemotronH_Omni_Reasoning_V3_Config.from_dict(read)
