# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Data sets of the training program, by the name that ``--data`` takes."""

from __future__ import annotations

from argparse import Namespace

from examples.mimo.nemotron_vlm.data.digits import DigitStrips
from examples.mimo.nemotron_vlm.data.mock import MockStrips
from examples.mimo.nemotron_vlm.data.sample import SampleSource, Text
from examples.mimo.nemotron_vlm.errors import UserError
from examples.mimo.nemotron_vlm.presets import EncoderPreset

__all__ = ["SampleSource", "Text", "make_source"]

SOURCES = {"digits": DigitStrips, "mock": MockStrips}


def make_source(args: Namespace, encoder: EncoderPreset) -> SampleSource:
    """Build the source that ``--data`` names, and tell the model its image token.

    Raises:
        UserError: if there is no such source, or its samples do not fit the tile, the sequence or
            the vocabulary.
    """
    name = args.data
    if name not in SOURCES:
        raise UserError(f"--data {name}: no such data; choose from {', '.join(SOURCES)}")
    try:
        source = SOURCES[name](
            tile=encoder.tile,
            tokens_per_tile=encoder.tokens_per_tile,
            seq_length=args.seq_length,
            seed=args.seed,
        )
        source.text("train", 0)
    except ValueError as error:
        raise UserError(f"--data {name}: {error}; change --seq-length or --model") from error
    if source.vocab_size > args.padded_vocab_size:
        raise UserError(
            f"--data {name} has token ids up to {source.vocab_size - 1}: --vocab-size must be at "
            f"least {source.vocab_size}"
        )
    args.image_token = source.image_token
    return source
