# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories: the parts of the model that they have, and their sizes."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conversion import nemotron_h, projector, radio
from conversion.config_values import check_values
from conversion.rows import Shape, Translation, differences, refuse
from conversion.tensor_files import TensorFiles
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.presets import VLMPreset

LANGUAGE, ENCODER, PROJECTOR = PARTS = ("language", "encoder", "projector")

OURS = {
    LANGUAGE: nemotron_h.PREFIX,
    ENCODER: radio.PREFIX,
    PROJECTOR: projector.PREFIX,
}

IN_VLM = {LANGUAGE: "language_model.", ENCODER: "vision_model.", PROJECTOR: projector.THEIRS}
"""Prefixes of the parts' names in a whole VLM."""

ALONE = {LANGUAGE: "", ENCODER: "", PROJECTOR: projector.THEIRS}

CONFIGS = {"nemotron_h": (LANGUAGE,), "radio": (ENCODER,), "nemotron_h_omni": PARTS}
"""Parts that a model has, by the ``model_type`` of its configuration."""


@dataclass(frozen=True)
class Source:
    """A part of the model in a directory.

    prefix: prefix of its names there. config: transformers' configuration; for a projector the
    whole VLM's, or None. beside: all parts that the directory has.
    """

    part: str
    files: TensorFiles
    prefix: str
    config: Any
    beside: tuple[str, ...]

    @property
    def outer(self) -> str:
        """The whole prefix of the part's names in the files."""
        if self.part == ENCODER:
            return self.prefix + radio.outer_name(self.files, self.prefix)
        return self.prefix

    def translation(self, preset: VLMPreset, ours: Mapping[str, Shape]) -> Translation:
        """Return the part's translation; ``ours`` are the shapes of our whole model."""
        if self.part == LANGUAGE:
            table = nemotron_h.language_table(preset.language)
        elif self.part == ENCODER:
            table = radio.encoder_table(preset.encoder)
        else:
            table = projector.projector_table()
        prefix, outer = OURS[self.part], self.outer
        whole = {
            prefix + name: tuple(replace(row, name=outer + row.name) for row in rows)
            for name, rows in table.items()
        }
        return Translation(whole, {n: shape for n, shape in ours.items() if n.startswith(prefix)})

    def not_held(self) -> list[str]:
        """Return the names of the part's tensors that our model can do without.

        Raises:
            UserError: our model cannot do without one of them.
        """
        if self.part != ENCODER:
            return []
        patterns = [self.outer + pattern for pattern in radio.NOT_HELD]
        names = matching(self.files.shapes, patterns)
        radio.check_scales(self.files, fnmatch.filter(names, self.outer + radio.SCALES))
        return names


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the names that match any of the patterns."""
    patterns = list(patterns)
    return [name for name in names if any(fnmatch.fnmatchcase(name, each) for each in patterns)]


def sources_of(
    directory: Path, wanted: Iterable[str] = PARTS, may_lack_tensors: bool = False
) -> list[Source]:
    """Return the parts in a directory, of those wanted.

    Raises:
        UserError: the directory has none of them, or lacks a configuration that is needed.
    """
    files = TensorFiles(directory, may_lack_tensors)
    if not (directory / "config.json").exists():
        if not any(name.startswith(projector.THEIRS) for name in files.shapes):
            raise UserError(f"{directory}: no config.json")
        found = [Source(PROJECTOR, files, ALONE[PROJECTOR], None, (PROJECTOR,))]
    else:
        found = _configured(files)
    chosen = [source for source in found if source.part in wanted]
    if not chosen:
        raise UserError(f"{directory} has no {' or '.join(wanted)}")
    return chosen


def _configured(files: TensorFiles) -> list[Source]:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(files.directory, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"{files.directory}/config.json: {error}") from error
    parts = CONFIGS.get(config.model_type)
    if parts is None:
        names = ", ".join(CONFIGS)
        raise UserError(
            f"{files.directory}/config.json: model_type is {config.model_type}, wanted {names}"
        )
    if len(parts) == 1:
        return [Source(parts[0], files, ALONE[parts[0]], config, parts)]
    check_values("the VLM", config, {"downsample_ratio": 0.5})
    if config.force_image_size:
        config.vision_config.image_size = config.force_image_size
    configs = {LANGUAGE: config.text_config, ENCODER: config.vision_config, PROJECTOR: config}
    return [Source(part, files, IN_VLM[part], configs[part], parts) for part in parts]


def preset_of(sources: list[Source], base: VLMPreset, tile: int | None) -> VLMPreset:
    """Return the sizes of the parts in ``sources``, and those of ``base`` for the others.

    Raises:
        UserError: our model does not support a size or option; the message names it.
    """
    preset = replace(base, name="converted")
    for source in sources:
        if source.part == LANGUAGE:
            language = nemotron_h.language_preset(source.config, base.language)
            preset = replace(preset, language=language)
        elif source.part == ENCODER:
            given = (source.config, base.encoder, tile, source.files, source.outer)
            encoder = radio.encoder_preset(*given)
            preset = replace(preset, encoder=encoder)
        elif source.config:
            preset = replace(preset, projector_ffn=source.config.projector_hidden_size)
        elif inner := source.files.shapes.get(source.prefix + projector.INNER):
            preset = replace(preset, projector_ffn=inner[0])
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
