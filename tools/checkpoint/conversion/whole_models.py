# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Whole models to the program and back; output directories appear complete or not at all.

A trained model needs no model to copy from: its checkpoint has the options of its run, which say
what the sizes are, how inputs were prepared, and which tokenizer wrote the texts.
"""

import contextlib
import json
import math
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path

import torch

from conversion.merged import whole_model
from conversion.published import Published, write_files
from conversion.rows import Translation, check_tensors, parts_of, rows_of
from conversion.torch_dist import Checkpoint, write_checkpoint
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data.reading_options import preset_of
from examples.mimo.nemotron_vlm.energon.chat_template import DEFAULT_TEMPLATE
from examples.mimo.nemotron_vlm.model.names import FIRST_DIGIT, IMAGES, SOUND
from examples.mimo.nemotron_vlm.model.presets import VLMPreset, find_preset, write_preset

MODEL = "model.json"
"""File of the sizes in a converted checkpoint, whose path ``--model`` takes."""

COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.md")
"""Patterns of a Hugging Face directory's files other than tensors, which are copied."""


INPUTS = "inputs.json"
"""File of how a trained model's inputs were prepared, with the names of the program's options."""

PREPARED = ("prompt", "image_token", "max_tiles", "thumbnail", "dynamic_resolution")
PREPARED += ("video_frames", "video_fps")

ASKED = "chat_template_kwargs"
"""Arguments with which the chat template asks as it did in training."""

DIGITS = "<s>{% for message in messages %}{{ message['content'] }} {% endfor %}"
"""Chat template of the digits that the program makes itself: ``read`` is the only question."""


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


def export(checkpoint: Path, out: Path) -> None:
    """Write a trained model as a Hugging Face directory.

    Args:
        checkpoint: directory of the program's checkpoint, or of one iteration.

    Raises:
        UserError: the checkpoint does not say what it is, transformers has no such model, or the
            tokenizer is no longer there.
    """
    saved = Checkpoint(checkpoint)
    args = saved.options
    preset = preset_of_run(args)
    with tempfile.TemporaryDirectory() as directory:
        like = Path(directory)
        _tokenizer(args, like)
        their_config(preset, args.token_ids).save_pretrained(like)
        write_preset(preset, like / MODEL)
        inputs = {name: getattr(args, name) for name in PREPARED}
        inputs[ASKED] = getattr(args, ASKED)
        if not args.tokenizer_model:
            inputs["thumbnail"] = False  # strips of digits are tiles side by side, and no more
        (like / INPUTS).write_text(json.dumps(inputs, indent=2) + "\n")
        to_hugging_face(saved.directory, like, out)


def their_config(preset: VLMPreset, token_ids: Mapping[str, int]):
    """Return transformers' configuration of a model of the program.

    Args:
        token_ids: token of each encoder's rows.

    Raises:
        UserError: transformers has no such model.
    """
    from transformers.models.nemotron_h_omni import NemotronH_Omni_Reasoning_V3_Config

    if not preset.is_in_transformers:
        raise UserError(f"{preset.name}: transformers' nemotron_h has no gated delta nets")
    of_parts: dict = {}
    for part, sizes in parts_of(preset):
        of_parts.setdefault(part.config, {}).update(part.fields(sizes))
    of_parts["text_config"] |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return NemotronH_Omni_Reasoning_V3_Config(
        **of_parts.pop(None),
        **{"audio_config": None} | of_parts,
        vision_hidden_size=preset.images.hidden,
        video_temporal_patch_size=of_parts["vision_config"]["video_temporal_patch_size"],
        image_token_id=token_ids[IMAGES],
        audio_token_id=token_ids.get(SOUND),
    )


def _tokenizer(args: Namespace, out: Path) -> None:
    """Write the tokenizer of the run's texts; the program's own digits are ids without one."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if args.tokenizer_model:
        given = Path(args.tokenizer_model)
        if not given.is_dir():
            raise UserError(f"the run's tokenizer {given} is no longer there")
        tokenizer = AutoTokenizer.from_pretrained(given, local_files_only=True)
        tokenizer.chat_template = tokenizer.chat_template or DEFAULT_TEMPLATE
        tokenizer.save_pretrained(out)
        return
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    # data/sample.py and the entry of sound have these ids.
    first = ["<pad>", "<s>", "</s>", "<image>", "read", "<so_embedding>", "<unk>"]
    words = {word: number for number, word in enumerate(first)}
    words |= {str(digit): FIRST_DIGIT + digit for digit in range(10)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [AddedToken(word, special=True) for word in first if word != "read"]
    tokenizer.add_special_tokens(special)
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=DIGITS, **named)
    fast.save_pretrained(out)
