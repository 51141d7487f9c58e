# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Logits of the program and of transformers for the same random text and media, in fp32."""

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from conversion.their_model import embedded, their_model, their_rows
from conversion.torch_dist import Checkpoint
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data.sample import IMAGES, SOUND, SampleSource, Text
from examples.mimo.nemotron_vlm.data.sound_lengths import SAMPLING_RATE
from examples.mimo.nemotron_vlm.loop import run as program
from examples.mimo.nemotron_vlm.loop.forward_step import forward_step
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options.arguments import parse
from examples.mimo.pretrain_nemotron_vlm import ALONE
from megatron.core.models.mimo.schedule.replaced import replaced

TEXT = 32
"""Tokens of a sample beside its media; half of them come before."""

LEAST = 4
"""Patches of an image at least: small models have small positions."""


class Medium(NamedTuple):
    """A kind of input: its encoder, the encoder's input, and its size as sources give it."""

    kind: str
    encoder: str = ""
    made: torch.Tensor | None = None
    size: int = 0


class Samples(SampleSource):
    """A sample of text, and one of text and each kind of media that both models take."""

    def __init__(self, preset: VLMPreset, config) -> None:
        self._preset, self.vocab_size, images = preset, preset.language.vocab_size, preset.images
        rng, sides = torch.Generator().manual_seed(1), (images.tile, images.tile)
        clip = torch.randint(256, (3, 3, *sides), generator=rng, dtype=torch.uint8)
        sound = torch.randn(SAMPLING_RATE // 2, generator=rng)
        self.media, grids, clips = [Medium("text")], images.grids, images.clips
        if hasattr(config, "vision_config"):
            self.media += [Medium("image", IMAGES, grids.cut(clip[0]), grids.size_of(*sides))]
            if clips:
                self.media += [Medium("video", IMAGES, clips.cut(clip), clips.size_of(3, *sides))]
            if SOUND in preset.names and config.audio_config:
                self.media += [Medium("sound", SOUND, sound, len(sound))]

    @property
    def token_ids(self) -> Mapping[str, int]:
        return {each.name: each.token for each in self._preset.encoders}

    def sizes(self, split: str, first: int, count: int, encoder: str) -> list[np.ndarray]:
        some = [self.media[n % len(self.media)] for n in range(first, first + count)]
        return [np.array([each.size] * (each.encoder == encoder), np.int64) for each in some]

    def inputs(self, split: str, number: int, encoder: str) -> list[torch.Tensor]:
        each = self.media[number]
        return [each.made] * (each.encoder == encoder)

    def text(self, split: str, number: int) -> Text:
        rng = torch.Generator().manual_seed(number)
        ids = torch.randint(self.vocab_size, (TEXT,), generator=rng)
        for token in self.token_ids.values():
            ids[ids == token] = self.vocab_size - 1
        for encoder in self._preset.encoders:
            rows = int(encoder.rows(*self.sizes(split, number, 1, encoder.name)).sum())
            media = torch.full((rows,), encoder.token)
            ids = torch.cat([ids[: TEXT // 2], media, ids[TEXT // 2 :]])
        return Text(ids, ids.roll(-1), torch.ones(len(ids)))

    def costs(self, split: str, first: int, count: int) -> np.ndarray:
        numbers = range(first, first + count)
        return np.array([(len(self.text(split, n).input_ids), 1) for n in numbers])


def differences(
    checkpoint: Path, directory: Path, preset: VLMPreset
) -> Iterator[tuple[str, float, float]]:
    """Yield a kind of input, the largest difference of its logits, and theirs' deviation.

    Args:
        checkpoint: the program's, trained or converted.
        directory: a Hugging Face directory with the same weights.
        preset: the checkpoint's sizes.

    Raises:
        UserError: one of them cannot be read.
    """
    if Checkpoint(checkpoint).directory == checkpoint:
        raise UserError(f"{checkpoint}: give the directory that --load takes, not one step's")
    preset = preset.with_images_of_any_size(LEAST)
    model, theirs = their_model(directory, as_ours=True), []
    source = Samples(preset, model.config)
    for number in range(len(source.media)):
        ids, rows = source.text("test", number).input_ids[None], {}
        with torch.no_grad():
            for encoder in preset.encoders:
                made = source.inputs("test", number, encoder.name)
                rows[encoder.token] = [their_rows(model, preset.images, each) for each in made]
            theirs.append(model(inputs_embeds=embedded(model, ids, rows)).logits[0])
    del model  # one of the two is in memory
    ours = our_logits(checkpoint, preset, source)
    for number, logits in enumerate(theirs):
        difference = (ours[number][: len(logits)] - logits).abs().max()
        yield source.media[number].kind, float(difference), float(logits.std())


def our_logits(checkpoint: Path, preset: VLMPreset, source: Samples) -> dict[int, torch.Tensor]:
    """Return the program's logits [tokens, vocabulary] of all samples, by number."""
    logits, count = {}, str(len(source.media))

    def noted(microbatches, stage, score=None):
        output, counted = forward_step(microbatches, stage)
        (number,) = counted.args[4]
        logits[number] = output[0].float().cpu()
        return output, counted

    length = max(len(source.text("test", n).input_ids) for n in range(len(source.media)))
    words = f"--seq-length {length} --micro-batch-size 1 --global-batch-size {count} --skip-train "
    words += f"--train-iters 1 --eval-iters 1 --dynamic-resolution-min-patches {LEAST} "
    words += "--dynamic-resolution --pretrained-checkpoint"
    os.environ.update(ALONE)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        session = program.open_session(parse([*words.split(), str(checkpoint)], 1, preset), source)
        with replaced(program, forward_step=noted):
            program.train(session)
        program.close_session(session)
        dist.destroy_process_group()
    return logits
