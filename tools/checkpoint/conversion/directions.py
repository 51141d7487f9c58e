# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The two conversions; their output directories appear complete or not at all."""

import contextlib
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import torch

from conversion.merged import whole_model
from conversion.program_model import program_model, saved_key
from conversion.published import Published, matching, parts_of, translation_of, with_sizes
from conversion.rows import differences, refuse
from conversion.tensor_files import write_files
from conversion.torch_dist import Checkpoint, write_checkpoint
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.presets import VLMPreset, find_preset, write_preset

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
    directory: Path, base: VLMPreset, out: Path, leave_out: list[str]
) -> tuple[list[str], list[str]]:
    """Write a checkpoint of the program from a Hugging Face directory.

    Args:
        base: preset with the model's encoders, and the sizes of those that the directory lacks.
        out: the new directory.
        leave_out: patterns of tensors that are not converted.

    Returns:
        Names of the tensors that were not converted, and the parts that the directory lacks, which
        have the program's initial weights.

    Raises:
        UserError: nothing is written then.
    """
    theirs = Published(directory, base)
    with program_model(theirs.preset) as program:
        translation = translation_of(theirs.parts, theirs.preset, program.shapes)
        dropped = theirs.check(translation, leave_out)

        def make(name: str) -> torch.Tensor:
            if name not in translation.of_ours:
                return program.initial(name)
            return translation.join(name, theirs.files.rows)

        dtypes = dict.fromkeys(program.parts, torch.float32) | {
            name: theirs.files.dtype(slices[0].theirs)
            for name, slices in translation.of_ours.items()
        }
        with whole_directory(out) as partial:
            write_preset(theirs.preset, partial / MODEL)
            write_checkpoint(partial, program.parts, dtypes, make)
    initial = [part.name for part in parts_of(base) if part not in theirs.parts]
    return dropped, initial + [each.name for each in base.encoders if not each.parts()]


def to_hugging_face(checkpoint: Path, like: Path, base: VLMPreset, out: Path) -> list[str]:
    """Write a Hugging Face directory from a checkpoint.

    Args:
        checkpoint: directory of the program's checkpoint.
        like: the directory of a model of the same sizes, with or without its tensors. Its
            configuration and other files are copied, and so are tensors that our model lacks.
        base: preset of the checkpoint.
        out: the new directory.

    Returns:
        Names of the tensors that were copied from ``like``.

    Raises:
        UserError: nothing is written then.
    """
    saved, theirs = whole_model(checkpoint), Published(like, base, may_lack_tensors=True)
    preset, files = theirs.preset, theirs.files
    if base.images.tubelet == 1 and not any(VIDEO_EMBEDDER in key for key in saved.tensors):
        images = replace(preset.images, tubelet=1)  # transformers' model always embeds video
        preset = with_sizes(preset, images.name, images)
    with program_model(preset) as program:
        parts = program.parts
        made = translation_of(theirs.parts, preset, program.shapes)
    held = tuple(saved_key(part.ours) for part in theirs.parts)
    wanted = {saved_key(part.key): tuple(part.global_shape) for part in parts.values()}
    wanted = {key: shape for key, shape in wanted.items() if key.startswith(held)}
    found = {key: value.size for key, value in saved.tensors.items() if key.startswith(held)}
    refuse(differences(wanted, found, saved.directory))
    copied = [name for name in files.shapes if name not in made.of_theirs]

    def make(names: list[str]) -> dict[str, torch.Tensor]:
        needed = {p.ours for name in names for p in made.of_theirs.get(name, ())}
        ours = saved.read({name: parts[name] for name in sorted(needed)})
        return {
            name: files.read(name) if name in copied else made.split(name, ours) for name in names
        }

    def size(name: str) -> int:
        """Return the bytes of a tensor of theirs."""
        if name in copied:
            return torch.Size(files.shapes[name]).numel() * files.dtype(name).itemsize
        key = saved_key(parts[made.of_theirs[name][0].ours].key)
        itemsize = saved.tensors[key].properties.dtype.itemsize
        return torch.Size(made.shapes[name]).numel() * itemsize

    sizes = {name: size(name) for name in sorted([*made.of_theirs, *copied])}
    with whole_directory(out) as directory:
        write_files(directory, sizes, make)
        for name in matching((path.name for path in like.iterdir() if path.is_file()), COPIED):
            if not name.endswith(".safetensors.index.json"):
                shutil.copyfile(like / name, directory / name)
    return copied
