# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sequence lengths and bounds of images to train with, and what each of them leaves out."""

import numpy as np

from examples.mimo.common.layout import table
from examples.mimo.nemotron_vlm.data.rows import Packing, best_fit
from examples.mimo.nemotron_vlm.energon.encoding import Encoder
from examples.mimo.nemotron_vlm.energon.images import Tiling
from examples.mimo.nemotron_vlm.energon.survey import Survey
from examples.mimo.nemotron_vlm.model.names import IMAGES

PERCENTILES = (50, 90, 99, 100)
"""Percentiles of samples and images that the tables show."""

KEPT = 0.99
"""Share of samples that the recommended length keeps, and of images to keep their size."""

WINDOWS = 16
"""Windows of samples that are packed to see how much padding is left."""


def advise(survey: Survey, encoder: Encoder, chosen: np.ndarray, packing: Packing) -> list[str]:
    """Return lines with a table of lengths, one of bounds of images, and a recommendation.

    Args:
        chosen: indices of the samples that can be used, int64 [n].
    """
    tokens = survey.tokens[chosen].astype(np.int64)
    lengths = list(dict.fromkeys(map(packing.padded, _percentiles(tokens))))
    rows = [["--seq-length", "samples kept", "tokens kept", "padding", "with --pack"]]
    for length in (*lengths, 2 * lengths[-1]):
        kept = tokens[tokens <= length]
        shares = len(kept) / len(tokens), kept.sum() / tokens.sum()
        paddings = 1 - kept.mean() / length, _packed_padding(kept, length, packing)
        rows.append([str(length), *(f"{share:.1%}" for share in (*shares, *paddings))])
    best = next(length for length in lengths if (tokens <= length).mean() >= KEPT)
    tables, advice = [table(rows)], f"--seq-length {best}"

    pixels = encoder.images
    sizes, counts = survey.media_in(chosen, [IMAGES])
    of = np.repeat(np.arange(len(chosen)), counts)
    keeping = ""
    if len(sizes):
        of_images = pixels.rows(sizes)
        if isinstance(pixels, Tiling):
            option, parts = "--max-tiles", sizes - (pixels.thumbnail & (sizes > 1))
        else:
            option = "--dynamic-resolution-max-patches"
            parts = of_images * pixels.grids.pixel_shuffle**2
        rows, kept = [[option, "images of surveyed size", "99 % of samples have at most"]], {}
        for bound in dict.fromkeys(_percentiles(parts)):
            kept[bound] = (parts <= bound).mean()
            saved = np.maximum(of_images - of_images[parts <= bound].max(), 0)
            fewer = tokens - np.bincount(of, saved, len(tokens)).astype(np.int64)
            within = np.percentile(fewer, 99, method="higher")
            rows.append([str(bound), f"{kept[bound]:.1%}", f"{within} tokens"])
        tables.append(table(rows))
        bound = next((each for each in kept if kept[each] >= KEPT), bound)
        advice += f" {option} {bound}"
        keeping = f", and with which {kept[bound]:.0%} of images keep their size"
    lines = [f"  {line}".rstrip() for text in tables for line in text.splitlines()]
    return [*lines, f"  recommended: {advice}, which {KEPT:.0%} of samples fit{keeping}"]


def _percentiles(values: np.ndarray) -> list[int]:
    return np.percentile(values, PERCENTILES, method="higher").astype(np.int64).tolist()


def _packed_padding(tokens: np.ndarray, length: int, packing: Packing) -> float:
    """Return the share of padding in packed rows, as the first windows have it."""
    size = packing.window
    windows = [tokens[i : i + size] for i in range(0, len(tokens), size)][:WINDOWS]
    padded = (best_fit(packing.padded(each).tolist(), length) for each in windows)
    return 1 - sum(each.sum() for each in windows) / (sum(map(len, padded)) * length)
