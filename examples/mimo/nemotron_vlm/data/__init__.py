# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Data sets of the training program, by the name that ``--data`` takes."""

from __future__ import annotations

from examples.mimo.nemotron_vlm.data.digits import DigitStrips
from examples.mimo.nemotron_vlm.data.mock import MockStrips
from examples.mimo.nemotron_vlm.data.sample import Sample, SampleSource
from examples.mimo.nemotron_vlm.errors import UserError
from examples.mimo.nemotron_vlm.presets import EncoderPreset

__all__ = ["Sample", "SampleSource", "make_source"]

SOURCES = {"digits": DigitStrips, "mock": MockStrips}


def make_source(name: str, encoder: EncoderPreset, seq_length: int, seed: int) -> SampleSource:
    """Build the source called ``name``.

    Raises:
        UserError: if there is no such source, or its samples do not fit the tile or the sequence.
    """
    if name not in SOURCES:
        raise UserError(f"--data {name}: no such data; choose from {', '.join(SOURCES)}")
    try:
        source = SOURCES[name](
            tile=encoder.tile,
            tokens_per_tile=encoder.tokens_per_tile,
            seq_length=seq_length,
            seed=seed,
        )
        source.sample("train", 0)
    except ValueError as error:
        raise UserError(f"--data {name}: {error}; change --seq-length or --model") from error
    return source
