# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Plans and readers for the preset ``tiny``, whose only encoder is that of images."""

from __future__ import annotations

import numpy as np

from examples.mimo.common.layout import Layouts
from examples.mimo.nemotron_vlm.data import SampleSource
from examples.mimo.nemotron_vlm.data.reading import Reader
from examples.mimo.nemotron_vlm.data.rows import Packing
from examples.mimo.nemotron_vlm.data.step_plan import InputRange, Share, StepPlan, StepWork, Take
from examples.mimo.nemotron_vlm.model.names import IMAGES
from examples.mimo.nemotron_vlm.model.presets import VLMPreset, tiny

TINY = tiny()
NO_WORK = StepWork(0.0, None)


def step_plan(
    layouts: Layouts, part: int | None, dp: int | None, *rest, preset: VLMPreset = TINY, **settings
) -> StepPlan:
    """The plan of a rank that encodes a part, and consumes on a DP rank."""
    width = preset.language.hidden_size
    return StepPlan(layouts, preset.encoders, {IMAGES: part}, dp, width, *rest, **settings)


def one_take(rows: list[list[int]], ranges: list[InputRange], *atoms: list[int]) -> Take:
    """A part of a microbatch; ``atoms`` are the rows encoded and consumed, if colocated."""
    return Take("train", rows, {IMAGES: Share(ranges, *map(np.array, atoms))}, NO_WORK)


def reader(source: SampleSource, packing: Packing | None, seq_length: int) -> Reader:
    """The reader of a rank that has labels, of two CP ranks."""
    flags = {"packing": packing, "reads_labels": True, "cp": 2, "sp": 1}
    tokens = source.token_ids
    return Reader(source, TINY.encoders, tokens, seq_length=seq_length, **flags)
