# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The two conversions; their output directories appear complete or not at all."""

import contextlib
import math
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import torch

from conversion.merged import whole_model
from conversion.published import Published, write_files
from conversion.rows import Translation, check_tensors, rows_of
from conversion.torch_dist import Checkpoint, write_checkpoint
from examples.mimo.nemotron_vlm.data.reading_options import preset_of
from examples.mimo.nemotron_vlm.model.presets import VLMPreset, find_preset, write_preset

MODEL = "model.json"
"""File of the sizes in a converted checkpoint, whose path ``--model`` takes."""

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
    preset = preset_of(args)
    sizes = {field.name: getattr(args, field.name) for field in fields(preset.language)}
    sizes["hybrid_layer_pattern"] = sizes["hybrid_layer_pattern"].replace("|", "")  # stages
    return replace(preset, language=replace(preset.language, **sizes))


@contextlib.contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Provide a directory to write to, which is renamed to ``out`` at the end."""
    partial = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def to_megatron(directory: Path, base: VLMPreset, out: Path) -> tuple[list[str], list[str]]:
    """Write a checkpoint of the program from a Hugging Face directory.

    Args:
        base: preset with the model's encoders.
        out: the new directory.

    Returns:
        Names of the tensors that were not converted, and the encoders that the directory lacks,
        which the new model lacks, too.

    Raises:
        UserError: nothing is written then.
    """
    theirs = Published(directory, base)
    made, files = Translation(theirs.preset), theirs.files
    left_out = theirs.left_out(made.shapes)
    dtypes = {name: files.dtype(slices[0].theirs) for name, slices in made.of_ours.items()}

    def make(name: str) -> torch.Tensor:
        rows = [files.rows(p.theirs, p.their_start, p.count) for p in made.of_ours[name]]
        return torch.cat(rows)

    with whole_directory(out) as partial:
        write_preset(theirs.preset, partial / MODEL)
        write_checkpoint(partial, made.parts, dtypes, make)
    return left_out, [name for name in base.names if name not in theirs.preset.names]


def to_hugging_face(checkpoint: Path, like: Path, out: Path) -> list[str]:
    """Write a Hugging Face directory from a checkpoint.

    Args:
        checkpoint: directory of the program's checkpoint.
        like: the directory of a model of the same sizes, with or without its tensors. Its
            configuration and other files are copied, and so are tensors that our model lacks.
        out: the new directory.

    Returns:
        Names of the tensors that were copied from ``like``.

    Raises:
        UserError: nothing is written then.
    """
    saved = whole_model(checkpoint)
    theirs = Published(like, preset_of_checkpoint(checkpoint))
    made, files = Translation(theirs.preset), theirs.files
    wanted = {part.key: part.global_shape for part in made.parts.values()}
    found = {key: value.size for key, value in saved.tensors.items()}
    check_tensors(wanted, found, saved.directory)
    copied = [name for name in files.shapes if name not in made.of_theirs]

    def make(names: list[str]) -> dict[str, torch.Tensor]:
        slices = {name: made.of_theirs[name] for name in names if name not in copied}
        needed = {each.ours for own in slices.values() for each in own}
        ours = saved.read({name: made.parts[name] for name in sorted(needed)})
        return {n: rows_of(slices[n], ours) if n in slices else files.read(n) for n in names}

    dtypes = {name: files.dtype(name) for name in copied}
    for name, slices in made.of_theirs.items():
        dtypes[name] = saved.tensors[made.parts[slices[0].ours].key].properties.dtype
    shapes = files.shapes | made.shapes
    sizes = {name: math.prod(shapes[name]) * dtypes[name].itemsize for name in sorted(dtypes)}
    with whole_directory(out) as directory:
        write_files(directory, sizes, make)
        for path in {path for pattern in COPIED for path in like.glob(pattern)}:
            if path.is_file() and not path.name.endswith(".safetensors.index.json"):
                shutil.copyfile(path, directory / path.name)
    return copied
