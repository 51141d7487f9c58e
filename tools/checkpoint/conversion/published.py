# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories of whole VLMs: the model's parts, their sizes, and their tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from conversion.rows import LANGUAGE, Shape, check_tensors, parts_of
from conversion.tensor_files import TensorFiles
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.encoders.hugging_face import Part, check_values
from examples.mimo.nemotron_vlm.model.presets import VLMPreset

VLM = "nemotron_h_omni"
"""``model_type`` of a VLM's configuration."""

RELEASED = "NemotronH_Nano_Omni_Reasoning_V3"
"""``model_type`` of the released VLM's configuration, which AutoConfig does not know."""


class Published:
    """A directory of a whole VLM, with or without its tensors.

    preset: the model of ``base`` with the directory's sizes, without encoders that it lacks.

    Raises:
        UserError: the directory has no such model, or one with a size or option that ours does not
            support; the message names it.
    """

    def __init__(self, directory: Path, base: VLMPreset) -> None:
        self.files = TensorFiles(directory)
        config = config_of(directory)
        check_values("the VLM", config, {"downsample_ratio": 0.5})
        if config.force_image_size:
            config.vision_config.image_size = config.force_image_size

        def described(part: Part) -> Any:
            return getattr(config, part.config) if part.config else config

        def sized(sizes: Any, parts: Iterable[Part]) -> Any:
            for part in parts:
                sizes = part.sizes(sizes, described(part), self.files)
            return sizes

        held = [e for e in base.encoders if e.parts() and None not in map(described, e.parts())]
        self.preset = replace(
            base,
            name="converted",
            language=sized(base.language, [LANGUAGE]),
            encoders=tuple(sized(each, each.parts()) for each in held),
        )

    def left_out(self, wanted: Mapping[str, Shape]) -> list[str]:
        """Return the names of the files' tensors that the model can do without.

        Args:
            wanted: shapes of the tensors that it needs, by name.

        Raises:
            UserError: tensors of its parts are missing, surplus or misshapen, or it cannot do
                without their values.
        """
        parts, found = [part for part, _ in parts_of(self.preset)], self.files.shapes
        prefixes = tuple(part.theirs for part in parts)
        unneeded = {name for part in parts for name in part.not_held(self.files)}
        unneeded |= {name for name in found if not name.startswith(prefixes)}
        left_out = sorted(unneeded - wanted.keys())
        kept = {name: shape for name, shape in found.items() if name not in left_out}
        check_tensors(wanted, kept, self.files.directory)
        return left_out


def config_of(directory: Path) -> Any:
    """Read a directory's configuration, as transformers' own class.

    Raises:
        UserError: it has none, or one of another model.
    """
    from transformers.models.nemotron_h_omni import NemotronH_Omni_Reasoning_V3_Config as Config

    try:
        read, _ = Config.get_config_dict(directory, local_files_only=True)
        kind = read["model_type"]
        if kind not in (VLM, RELEASED):
            raise UserError(f"{directory}/config.json: model_type is {kind}, wanted {VLM}")
        if kind == RELEASED and read.get("sound_config"):
            read["sound_config"].pop("model_type", None)  # "parakeet": transformers 5.24 refuses it
        return Config.from_dict(read | {"model_type": VLM})
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"{directory}/config.json: {error}") from error
