# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Logits of the program and of transformers for the same random text and media, in fp32."""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from conversion.merged import loading
from conversion.their_model import embedded, their_model
from conversion.torch_dist import Checkpoint
from conversion.whole_models import preset_of_checkpoint
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data.sample import SampleSource, Text
from examples.mimo.nemotron_vlm.loop import run as program
from examples.mimo.nemotron_vlm.loop.forward_step import forward_step
from examples.mimo.nemotron_vlm.model.encoders.radio import Radio, RadioOfAnySize
from examples.mimo.nemotron_vlm.model.media_sizes import SAMPLING_RATE
from examples.mimo.nemotron_vlm.model.names import IMAGES, SOUND
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options.run import Run
from examples.mimo.pretrain_nemotron_vlm import ALONE
from megatron.core.models.mimo.schedule.replaced import replaced

TEXT = 32
"""Tokens of a sample beside its media; half of them come before."""

LEAST = 4
"""Patches of an image at least: small models have small positions."""


Inputs = Mapping[str, tuple[Sequence[int], Sequence[torch.Tensor]]]
"""Sizes of a sample's inputs, as sources give them, and the inputs; by encoder."""

NONE = ((), ())


class Given(SampleSource):
    """Samples that are given, over and over: tokens [n], all of which are asked for, and inputs.

    fields: attributes of a source that differ from the usual ones.
    """

    def __init__(self, samples: Sequence[tuple[torch.Tensor, Inputs]], **fields) -> None:
        self.samples = samples
        vars(self).update(fields)

    def text(self, split: str, number: int) -> Text:
        ids, _ = self.samples[number % len(self.samples)]
        return Text(ids, ids.roll(-1), torch.ones(len(ids)))

    def _inputs(self, number: int, encoder: str) -> tuple[Sequence[int], Sequence[torch.Tensor]]:
        return self.samples[number % len(self.samples)][1].get(encoder, NONE)

    def sizes(self, split: str, first: int, count: int, encoder: str) -> list[np.ndarray]:
        numbers = range(first, first + count)
        return [np.array(self._inputs(number, encoder)[0], np.int64) for number in numbers]

    def inputs(self, split: str, number: int, encoder: str) -> Sequence[torch.Tensor]:
        return self._inputs(number, encoder)[1]

    def costs(self, split: str, first: int, count: int) -> np.ndarray:
        return np.array([(len(self.text(split, first + n).labels), 1) for n in range(count)])


def of_each_kind(preset: VLMPreset, config: Any) -> tuple[list[str], Given]:
    """Return the kinds of media that both models take, ``text`` first, and a sample of each.

    Media of several sizes are in a sample, a sound beside an image.

    Args:
        preset: the program's model. config: of transformers' model.
    """
    rng, images = torch.Generator().manual_seed(1), preset.images
    side, cutters = images.tile, {2: images.grids, 3: images.clips}
    wide = side // 2, side * 5 // 4

    def seen(*shapes: tuple[int, ...]) -> Inputs:
        """Return images, of heights and widths in pixels, and clips, of frames before them."""
        pixels = [torch.randint(256, (*s[:-2], 3, *s[-2:]), generator=rng) for s in shapes]
        cut = [cutters[len(s)].cut(p.byte()) for s, p in zip(shapes, pixels, strict=True)]
        return {IMAGES: ([cutters[len(shape)].size_of(*shape) for shape in shapes], cut)}

    kinds: dict[str, Inputs] = {"text": {}, "image": seen((side, side), wide)}
    if images.clips:
        kinds["video"] = seen((3, side, side), wide, (4, *wide))
    if SOUND in preset.names and config.audio_config:
        lengths = SAMPLING_RATE // 2, 1279, 400
        sounds = [torch.randn(length, generator=rng) for length in lengths]
        kinds["sound"] = seen((side, side)) | {SOUND: (lengths, sounds)}
    tokens, vocabulary = {e.name: e.token for e in preset.encoders}, preset.language.vocab_size
    samples = []
    for inputs in kinds.values():
        ids = torch.randint(vocabulary, (TEXT,), generator=rng)
        ids[torch.isin(ids, torch.tensor([*tokens.values()]))] = vocabulary - 1
        for encoder in preset.encoders:
            sizes = np.array(inputs.get(encoder.name, NONE)[0], np.int64)
            media = torch.full((int(encoder.rows(sizes).sum()),), encoder.token)
            ids = torch.cat([ids[: TEXT // 2], media, ids[TEXT // 2 :]])
        samples.append((ids, inputs))
    return list(kinds), Given(samples, token_ids=tokens, vocab_size=vocabulary)


def differences(checkpoint: Path, directory: Path) -> Iterator[tuple[str, float, float]]:
    """Yield a kind of input, the largest difference of its logits, and theirs' deviation.

    Args:
        checkpoint: the program's, trained or converted.
        directory: a Hugging Face directory with the same weights.

    Raises:
        UserError: one of them cannot be read.
    """
    if Checkpoint(checkpoint).directory == checkpoint:
        raise UserError(f"{checkpoint}: give the directory that --load takes, not one step's")
    preset = preset_of_checkpoint(checkpoint).with_images_of_any_size(LEAST)
    model = their_model(directory, as_ours=True)
    kinds, source = of_each_kind(preset, model.config)
    with torch.no_grad():
        theirs = their_logits(model, preset.images, source)
    del model  # one of the two is in memory
    ours = our_logits(checkpoint, preset, source)
    for kind, own, logits in zip(kinds, ours, theirs, strict=True):
        difference = (own[: len(logits)] - logits).abs().max()
        yield kind, float(difference), float(logits.std())


def their_logits(model, images: Radio, source: Given) -> list[torch.Tensor]:
    """Return the logits [tokens, vocabulary] of a model of transformers, of each sample."""
    logits = []
    for ids, inputs in source.samples:
        made = {source.token_ids[encoder]: each for encoder, (_, each) in inputs.items()}
        embeddings = embedded(model, images, ids, made)
        logits.append(model(inputs_embeds=embeddings[None]).logits[0])
    return logits


def our_logits(
    checkpoint: Path, preset: VLMPreset, source: Given, *words: str
) -> list[torch.Tensor]:
    """Return the program's logits [tokens, vocabulary] of each sample, with padding.

    Args:
        words: more options of the run.
    """
    logits, count = {}, str(len(source.samples))

    def noted(microbatches, stage, score=None):
        output, counted = forward_step(microbatches, stage)
        (number,) = counted.args[4]
        logits[number] = output[0].float().cpu()
        return output, counted

    length = max(len(ids) for ids, _ in source.samples)
    line = f"--seq-length {length} --micro-batch-size 1 --global-batch-size {count} --skip-train "
    line += "--train-iters 1 --eval-iters 1"
    if isinstance(preset.images, RadioOfAnySize):
        line += " --dynamic-resolution"
    os.environ.update(ALONE)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        session = program.open_session(
            Run.of([*line.split(), *loading(checkpoint), *words], 1, preset), source
        )
        try:
            with replaced(program, forward_step=noted):
                program.train(session)
        finally:
            program.close_session(session)
            dist.destroy_process_group()
    return [logits[number] for number in sorted(logits)]
