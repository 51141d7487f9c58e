# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories: the parts of the model that they have, and their sizes."""

import fnmatch
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conversion.nemotron_h import LanguagePart
from conversion.rows import Shape, Translation, differences, refuse
from conversion.tensor_files import TensorFiles
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.encoders.hugging_face import Part, check_values
from examples.mimo.nemotron_vlm.model.presets import VLMPreset

VLM = "nemotron_h_omni"
"""``model_type`` of a whole VLM's configuration."""

RELEASED = "NemotronH_Nano_Omni_Reasoning_V3"
"""``model_type`` of the released VLM's configuration, which AutoConfig does not know."""

LANGUAGE = LanguagePart(
    "language", "language_model.", "language_model.", "", "text_config", "nemotron_h"
)


def parts_of(preset: VLMPreset) -> dict[Part, str | None]:
    """Return the parts of a model with the encoder of each; None for the language model."""
    return {LANGUAGE: None} | {
        part: encoder.name for encoder in preset.encoders for part in encoder.parts()
    }


def sizes_of(preset: VLMPreset, encoder: str | None) -> Any:
    """Return the sizes of an encoder, or of the language model (None)."""
    return next((each for each in preset.encoders if each.name == encoder), preset.language)


@dataclass(frozen=True)
class Source:
    """A part of the model in a directory.

    encoder: name of the part's encoder; None for the language model. prefix: prefix of the part's
    names there. config: transformers' configuration of the part, or None. beside: all parts that
    the directory has.
    """

    part: Part
    encoder: str | None
    files: TensorFiles
    prefix: str
    config: Any
    beside: tuple[Part, ...]

    @property
    def outer(self) -> str:
        """The whole prefix of the part's names in the files."""
        return self.part.outer(self.files, self.prefix)

    def translation(self, preset: VLMPreset, ours: Mapping[str, Shape]) -> Translation:
        """Return the part's translation; ``ours`` are the shapes of our whole model."""
        prefix, outer = self.part.ours, self.outer
        whole = {
            prefix + name: tuple(replace(row, name=outer + row.name) for row in rows)
            for name, rows in self.part.table(sizes_of(preset, self.encoder)).items()
        }
        return Translation(whole, {n: shape for n, shape in ours.items() if n.startswith(prefix)})

    def not_held(self) -> list[str]:
        """Return the names of the part's tensors that our model can do without.

        Raises:
            UserError: our model cannot do without one of them.
        """
        return self.part.not_held(self.files, self.outer)


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the names that match any of the patterns."""
    patterns = list(patterns)
    return [name for name in names if any(fnmatch.fnmatchcase(name, each) for each in patterns)]


def sources_of(
    directory: Path,
    base: VLMPreset,
    wanted: Iterable[Part] | None = None,
    may_lack_tensors: bool = False,
) -> list[Source]:
    """Return the parts in a directory, of those wanted, or of all of ``base``.

    Raises:
        UserError: the directory has none of them, or lacks a configuration that is needed.
    """
    files, parts = TensorFiles(directory, may_lack_tensors), parts_of(base)
    wanted = list(wanted or parts)
    if (directory / "config.json").exists():
        found = _configured(files, parts)
    else:
        bare = [
            part
            for part in parts
            if part.alone and any(name.startswith(part.alone) for name in files.shapes)
        ]
        if not bare:
            raise UserError(f"{directory}: no config.json")
        found = [Source(p, parts[p], files, p.alone, None, tuple(bare)) for p in bare]
    chosen = [source for source in found if source.part in wanted]
    if not chosen:
        raise UserError(f"{directory} has no {' or '.join(part.name for part in wanted)}")
    return chosen


def _configured(files: TensorFiles, parts: Mapping[Part, str | None]) -> list[Source]:
    try:
        config = config_of(files.directory)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"{files.directory}/config.json: {error}") from error
    alone = [part for part in parts if part.model_type == config.model_type]
    if alone:
        return [Source(p, parts[p], files, p.alone, config, (p,)) for p in alone]
    if config.model_type != VLM:
        names = ", ".join([*(part.model_type for part in parts if part.model_type), VLM])
        raise UserError(
            f"{files.directory}/config.json: model_type is {config.model_type}, wanted {names}"
        )
    check_values("the VLM", config, {"downsample_ratio": 0.5})
    if config.force_image_size:
        config.vision_config.image_size = config.force_image_size
    configs = {part: getattr(config, part.config) if part.config else config for part in parts}
    has = [part for part in parts if configs[part] is not None]  # a VLM may have no sound
    return [Source(p, parts[p], files, p.in_vlm, configs[p], tuple(has)) for p in has]


def config_of(directory: Path) -> Any:
    """Read a directory's configuration, as transformers' own class."""
    from transformers import AutoConfig

    read = json.loads((directory / "config.json").read_text())
    if read.get("model_type") != RELEASED:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    from transformers.models.nemotron_h_omni import NemotronH_Omni_Reasoning_V3_Config

    read["model_type"] = VLM
    if read.get("sound_config"):
        read["sound_config"].pop("model_type", None)  # "parakeet", which transformers 5.24 refuses
    return NemotronH_Omni_Reasoning_V3_Config.from_dict(read)


def preset_of(sources: list[Source], base: VLMPreset, tile: int | None) -> VLMPreset:
    """Return the sizes of the parts in ``sources``, and those of ``base`` for the others.

    Raises:
        UserError: our model does not support a size or option; the message names it.
    """
    preset = replace(base, name="converted")
    for source in sources:
        given = sizes_of(preset, source.encoder), source.config, source.files, source.outer, tile
        sizes = source.part.sizes(*given)
        if source.encoder is None:
            preset = replace(preset, language=sizes)
        else:
            encoders = (sizes if e.name == source.encoder else e for e in preset.encoders)
            preset = replace(preset, encoders=tuple(encoders))
    return preset


def check_sources(
    sources: list[Source], translations: list[Translation], leave_out: list[str]
) -> list[str]:
    """Check that the files have the tensors that the model needs, and no others.

    Args:
        leave_out: patterns of names that are not converted.

    Returns:
        Names of the files' tensors that the model does not have.

    Raises:
        UserError: tensors are missing, surplus or misshapen; the message lists them. Or
            ``leave_out`` matches tensors that the model has.
    """
    problems, left_out = [], set()
    for directory in dict.fromkeys(source.files.directory for source in sources):
        wanted: dict[str, Shape] = {}
        here = []
        for source, translation in zip(sources, translations, strict=True):
            if source.files.directory == directory:
                wanted |= translation.shapes
                here.append(source)
        found = dict(here[0].files.shapes)
        if {source.part for source in here} < set(here[0].beside):
            prefixes = tuple(source.prefix for source in here)
            found = {name: shape for name, shape in found.items() if name.startswith(prefixes)}
        dropped = {*matching(found, leave_out)}.union(*(source.not_held() for source in here))
        if needed := sorted(dropped & wanted.keys()):
            raise UserError(f"--leave-out fits what the model has: {', '.join(needed)}")
        left_out |= dropped
        found = {name: shape for name, shape in found.items() if name not in dropped}
        problems += differences(wanted, found, directory)
    refuse(problems)
    return sorted(left_out)
