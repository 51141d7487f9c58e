# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The two conversions; their output directories appear complete or not at all."""

import contextlib
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path

import torch

from conversion.merged import whole_model
from conversion.program_model import program_model, saved_key
from conversion.rows import differences, refuse
from conversion.sources import Source, check_sources, matching, parts_of, preset_of, sources_of
from conversion.tensor_files import write_files
from conversion.torch_dist import Checkpoint, write_checkpoint
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.presets import VLMPreset, find_preset, write_preset
from megatron.core.dist_checkpointing.mapping import ShardedTensor

MODEL = "model.json"
"""File of the sizes in a converted checkpoint, whose path ``--model`` takes."""

VIDEO_EMBEDDER = ".video_embedder."
"""Part of the name of our embedder of video."""

COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.md")
"""Patterns of a Hugging Face directory's files other than tensors, which are copied."""


def preset_of_checkpoint(checkpoint: Path) -> VLMPreset:
    """Return the sizes of a checkpoint's model: those in its file, or those of its run."""
    converted = checkpoint / MODEL
    if converted.exists():
        return find_preset(str(converted))
    return preset_of_run(Checkpoint(checkpoint).options)


def preset_of_run(args: Namespace) -> VLMPreset:
    """Return the sizes of a run's model, whose options may be others than those of ``--model``."""
    preset = find_preset(args.model)
    sizes = {field.name: getattr(args, field.name) for field in fields(preset.language)}
    sizes["hybrid_layer_pattern"] = sizes["hybrid_layer_pattern"].replace("|", "")  # stages
    return replace(preset, language=replace(preset.language, **sizes))


@contextlib.contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Provide a directory to write to, which is renamed to ``out`` at the end.

    Raises:
        UserError: the directory cannot be written.
    """
    partial = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def to_megatron(
    sources: list[Source],
    base: VLMPreset,
    out: Path,
    tile: int | None,
    leave_out: list[str],
    seed: int,
) -> tuple[list[str], list[str]]:
    """Write a checkpoint of the program.

    Args:
        sources: parts of the model, each once.
        base: preset with the sizes of the parts without a source.
        out: the new directory.
        tile: height and width of a tile in pixels; None for those of the encoder's configuration.
        leave_out: patterns of tensors that are not converted.
        seed: seed of the initial weights of parts without a source.

    Returns:
        Names of the tensors that were not converted, and the parts with initial weights.

    Raises:
        UserError: nothing is written then.
    """
    preset = preset_of(sources, base, tile)
    with program_model(preset) as program:
        translations = [source.translation(preset, program.shapes) for source in sources]
        dropped = check_sources(sources, translations, leave_out)
        origin = {
            name: (source, translation)
            for source, translation in zip(sources, translations, strict=True)
            for name in translation.of_ours
        }

        def make(name: str) -> torch.Tensor:
            if name not in origin:
                return program.initial(name, seed)
            source, translation = origin[name]
            return translation.join(name, source.files.rows)

        dtypes = dict.fromkeys(program.parts, torch.float32) | {
            name: source.files.dtype(translation.of_ours[name][0].theirs)
            for name, (source, translation) in origin.items()
        }
        with whole_directory(out) as directory:
            write_preset(preset, directory / MODEL)
            write_checkpoint(directory, program.parts, dtypes, make)
    given = {source.part for source in sources}
    initial = [part.name for part in parts_of(preset) if part not in given]
    return dropped, initial + [each.name for each in preset.encoders if not each.parts()]


def to_hugging_face(checkpoint: Path, like: Path, base: VLMPreset, out: Path) -> list[str]:
    """Write a Hugging Face directory from a checkpoint.

    Args:
        checkpoint: directory of the program's checkpoint.
        like: the directory of a model of the same sizes, with or without its tensors. Its
            configuration and other files are copied, and so are tensors that our model lacks.
        base: preset with the checkpoint's encoders, and the sizes of the parts that ``like`` does
            not have.
        out: the new directory.

    Returns:
        Names of the tensors that were copied from ``like``.

    Raises:
        UserError: nothing is written then.
    """
    saved = whole_model(checkpoint)
    _check_encoders(saved, base)
    sources = sources_of(like, base, may_lack_tensors=True)
    preset = preset_of(sources, base, None)
    if base.images.tubelet == 1 and not any(VIDEO_EMBEDDER in key for key in saved.tensors):
        images = replace(preset.images, tubelet=1)  # transformers' model always embeds video
        rest = (images if each.name == images.name else each for each in preset.encoders)
        preset = replace(preset, encoders=tuple(rest))
    with program_model(preset) as program:
        parts = program.parts
        translations = [source.translation(preset, program.shapes) for source in sources]
    _check_saved(saved, sources, parts)
    files = sources[0].files
    made = {name: each for each in translations for name in each.of_theirs}
    copied = [name for name in files.shapes if name not in made]

    def make(names: list[str]) -> dict[str, torch.Tensor]:
        needed = {p.ours for name in names if name in made for p in made[name].of_theirs[name]}
        ours = saved.read({name: parts[name] for name in sorted(needed)})
        return {
            name: made[name].split(name, ours) if name in made else files.read(name)
            for name in names
        }

    def size(name: str) -> int:
        """Return the bytes of a tensor of theirs."""
        if name not in made:
            return torch.Size(files.shapes[name]).numel() * files.dtype(name).itemsize
        first = parts[made[name].of_theirs[name][0].ours]
        itemsize = saved.tensors[saved_key(first.key)].properties.dtype.itemsize
        return torch.Size(made[name].shapes[name]).numel() * itemsize

    sizes = {name: size(name) for name in sorted([*made, *copied])}
    with whole_directory(out) as directory:
        write_files(directory, sizes, make)
        for name in matching((path.name for path in like.iterdir() if path.is_file()), COPIED):
            if not name.endswith(".safetensors.index.json"):
                shutil.copyfile(like / name, directory / name)
    return copied


def _check_encoders(saved: Checkpoint, base: VLMPreset) -> None:
    """Refuse sizes of other encoders, whose tensors would be copied from another model."""
    held = {key.split(".")[1] for key in saved.tensors if key.startswith("modality_submodules.")}
    if held != set(base.names):
        names = " and ".join(sorted(held))
        raise UserError(f"{saved.directory} has encoders of {names}: give their --model, or none")


def _check_saved(
    saved: Checkpoint, sources: list[Source], parts: Mapping[str, ShardedTensor]
) -> None:
    """Check that the checkpoint has the model's tensors, by their names in the checkpoint."""
    held = tuple(saved_key(source.part.ours) for source in sources)
    wanted = {saved_key(part.key): tuple(part.global_shape) for part in parts.values()}
    wanted = {key: shape for key, shape in wanted.items() if key.startswith(held)}
    found = {key: value.size for key, value in saved.tensors.items() if key.startswith(held)}
    refuse(differences(wanted, found, saved.directory))
