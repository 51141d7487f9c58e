# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Data sets of the training program, by the name that ``--data`` takes."""

from __future__ import annotations

import inspect
import os
from argparse import Namespace
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data.digits import DigitStrips, MockStrips
from examples.mimo.nemotron_vlm.data.sample import DigitTask, SampleSource
from examples.mimo.nemotron_vlm.data.whole_images import WholeImages, most_rows
from examples.mimo.nemotron_vlm.model.names import SOUND

if TYPE_CHECKING:
    from examples.mimo.nemotron_vlm.energon.encoding import Encoder
    from examples.mimo.nemotron_vlm.model.presets import VLMPreset

SOURCES = {"digits": DigitStrips, "mock": MockStrips}

DIGITS = "digits:"

ENERGON = "energon:"

SUFFIXES = (".jsonl", ".json", ".parquet")
"""Ends of names of files of records."""

PREPARATION = """tokenizer_model image_token prompt max_tiles thumbnail video_frames video_fps
    video_target_num_patches dynamic_resolution dynamic_resolution_min_patches
    dynamic_resolution_max_patches""".split()
"""Arguments that decide how conversations and media become tokens and inputs."""


TRUTH = {"true": True, "false": False}
READERS = {bool: TRUTH.__getitem__, int: int, float: float, Path: Path}
"""Readers of a parameter's text, by its type; other types take the text."""


def path_of(data: str) -> str | None:
    """Return the path of shards or files that ``--data`` names; None for another source."""
    if data.startswith(ENERGON):
        return data.removeprefix(ENERGON)
    return data if data.endswith(SUFFIXES) else None


def seen_from(folder: Path, args: Namespace) -> None:
    """Let the paths of a run's options name the same files from any folder.

    Args:
        folder: the folder in which the run began.
        args: its options; a preset's name, or a path of no file there, stays as it is.
    """
    from examples.mimo.nemotron_vlm.model.presets import PRESETS

    for name in ("model", "data", "tokenizer_model", "surveys", "pretrained_checkpoint"):
        given = getattr(args, name) or ""
        path = path_of(given) if name == "data" else given
        is_preset = name == "model" and given in PRESETS
        if path and not is_preset and os.path.exists(folder / path):  # False if it may not look
            setattr(args, name, given.removesuffix(path) + str(folder / path))


def have_equal_images(args: Namespace) -> bool:
    """Return whether all rows have as many images of one size, as graphs of an encoder need."""
    varies = args.dynamic_resolution or args.pack
    return (args.data == "mock" or args.data.startswith(DIGITS)) and not varies


def make_source(args: Namespace, preset: VLMPreset) -> SampleSource:
    """Build the source that ``--data`` names, for a model's encoders.

    Raises:
        UserError: there is no such source, or its samples do not fit the tile, the sequence length
            or the vocabulary; or the file system refuses to read it, which other ranks may not see.
    """
    name, images = args.data, preset.images
    path, kind = path_of(name), SOURCES.get(name.partition(":")[0])
    given = {
        "tile": images.tile,
        "tokens_per_tile": most_rows(images) if args.dynamic_resolution else images.tokens_per_tile,
        "seq_length": args.seq_length,
        "seed": args.seed,
        "images": images,
    }
    try:
        if path is not None:
            source = _energon(path, args, preset)
        else:
            chosen, words = kind or _imported(name), name.removeprefix(DIGITS)
            if "encoder" in _parameters_of(chosen):
                given["encoder"] = make_encoder(args, preset)
            named = name if words == name else f"{DIGITS}digits={digits_of_strip(words)}"
            source = _build(chosen, named, given)
            source.text("train", 0)
        if args.dynamic_resolution and isinstance(source, DigitTask):
            source = WholeImages(source, images, args.seq_length, args.seed)
    except ImportError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"--data: {error}", args.rank) from error
    except ValueError as error:
        if path is not None:
            reason = str(error).removeprefix(f"{Path(path).absolute()}: ")
            raise UserError(f"--data {name}: {reason}") from error
        advice = "; change --seq-length or --model" if kind else ""
        raise UserError(f"--data {name}: {error}{advice}") from error
    if source.vocab_size > args.vocab_size:
        raise UserError(
            f"--data {name} has token ids up to {source.vocab_size - 1}: --vocab-size must be at "
            f"least {source.vocab_size}"
        )
    return source


def fingerprint(source: SampleSource, args: Namespace) -> str:
    """Identify the rows that a run reads: a resumed run must have the same fingerprint."""
    if not args.pack:
        return source.fingerprint
    packing = args.pack_window, args.sample_multiple, args.seq_length
    return f"{source.fingerprint} packed {packing}"


def digits_of_strip(text: str) -> int:
    """Read the number N of ``--data digits:N``."""
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--data {DIGITS}{text}: the digits of a strip must be 1 or more")
    return int(text)


def _imported(data: str) -> type[SampleSource]:
    try:
        module, _, name = data.partition(":")[0].rpartition(".")
        kind = getattr(import_module(module), name)
        if not issubclass(kind, SampleSource):
            raise ValueError(f"{kind.__name__} is no subclass of SampleSource")
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(
            [*SOURCES, f"{DIGITS}N", f"{ENERGON}PATH", *map("FILE{}".format, SUFFIXES)]
        )
        raise UserError(
            f"--data {data}: no such data; choose from {known}, or module.Class[:KEY=VALUE,…] with "
            f"the module's folder in PYTHONPATH ({error})"
        ) from error
    return kind


def _parameters_of(kind: type[SampleSource]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind, eval_str=True).parameters


def _build(kind: type[SampleSource], data: str, given: Mapping[str, Any]) -> SampleSource:
    """Build the source that ``--data NAME:key=value,…`` asks for.

    Args:
        data: what ``--data`` has.
        given: what the program gives to the parameters of these names.

    Raises:
        UserError: a key is unknown or missing, or its value is not of the parameter's type.
    """
    parameters = _parameters_of(kind)
    own = {name: each for name, each in parameters.items() if name not in given}
    texts = [word.partition("=") for word in data.partition(":")[2].split(",") if word]
    values = {name: given[name] for name in parameters if name in given}
    wrong = [f"no parameter {name}" for name, _, _ in texts if name not in own]
    for name, _, text in texts if not wrong else ():
        types = get_args(own[name].annotation) or (own[name].annotation,)
        read = next((READERS[each] for each in types if each in READERS), str)
        try:
            values[name] = read(text)
        except (ValueError, KeyError):
            wrong.append(f"{name}={text} is no {types[0].__name__}")
    wrong += [f"{n} is missing" for n in own if n not in values and own[n].default is own[n].empty]
    if wrong:
        takes = [str(each) for each in own.values()] or ["no parameters"]
        raise UserError(f"--data {data}: {wrong[0]}; {kind.__name__} takes {', '.join(takes)}")
    return kind(**values)


def _energon(path: str, args: Namespace, preset: VLMPreset) -> SampleSource:
    from examples.mimo.nemotron_vlm.energon.source import EnergonSource
    from examples.mimo.nemotron_vlm.energon.survey import NoSurvey

    encoder = make_encoder(args, preset)
    rest = args.seq_length, args.seed, args.bad_samples, args.surveys, args.long_samples
    try:
        return EnergonSource(path, encoder, *rest)
    except NoSurvey as error:
        from examples.mimo.nemotron_vlm.energon.__main__ import command

        raise ValueError(f"{error}; make one: {command(path, args)}") from error


def make_encoder(args: Namespace, preset: VLMPreset) -> Encoder:
    """Build the encoder of conversations and their media that options and a model ask for.

    Raises:
        UserError: the energon extra is not installed, or no tokenizer is named.
        ValueError: the tokenizer does not fit.
    """
    if args.tokenizer_model is None:
        raise UserError(
            f"--data {args.data} needs --tokenizer-model DIR, of a Hugging Face tokenizer"
        )
    from examples.mimo.nemotron_vlm.energon.conversation import Chat
    from examples.mimo.nemotron_vlm.energon.encoding import Encoder
    from examples.mimo.nemotron_vlm.energon.images import Resizing, Tiling
    from examples.mimo.nemotron_vlm.energon.videos import Watching

    entries = {each.name: each for each in preset.encoders}
    images, sound = preset.images, entries.get(SOUND)
    chat = Chat(args.tokenizer_model, args.image_token, sound is not None)
    subsampling = sound.subsampling_factor if sound else None
    if not args.dynamic_resolution:
        tiling = Tiling(images.tile, args.max_tiles, args.thumbnail, images.tokens_per_tile)
        return Encoder(chat, tiling, args.prompt, subsampling)
    watching = None
    if images.clips:
        watching = Watching(images.clips, args.video_frames, args.video_fps)
    return Encoder(chat, Resizing(images.grids), args.prompt, subsampling, watching)
