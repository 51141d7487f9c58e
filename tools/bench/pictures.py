# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Make a data set whose samples differ in work: pictures of one to thirteen tiles, and text; or a
mixture like that of users (mixture.py)."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import webdataset
from PIL import Image

from examples.mimo.nemotron_vlm.model.presets import find_preset

DATA_TOOLS = Path(__file__).resolve().parents[1] / "data"
sys.path.insert(0, str(DATA_TOOLS))

import mixture  # noqa: E402

from make_webdataset import OMNI, conversation, prepare, write_tokenizer  # noqa: E402
from omni_tasks import image_bytes  # noqa: E402

SHAPES = [(1, 1, 0.55), (2, 1, 0.15), (2, 2, 0.1), (3, 1, 0.05), (3, 4, 0.05), (0, 0, 0.1)]
"""Columns and rows of tiles of a picture, and its probability; 0 by 0 is text alone."""

WORDS = (4, 40)
"""Fewest words of a question or an answer, and one more than the most."""


SHARDS = 16
"""Shards of the training part, which processes write and survey at the same time."""


def make(path: Path, kind: str, samples: int, arguments: list[str]) -> list[str]:
    """Write shards, prepared for energon and surveyed, with a tokenizer.

    Args:
        path: a new directory.
        kind: 'pictures' or 'mixture'.
        arguments: the program's, of which the model decides the sizes of tiles.

    Returns:
        The program's arguments for these data.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dynamic-resolution", action="store_true")
    given = parser.parse_known_args(arguments)[0]
    draw, words = partial(_sample, tile=find_preset(given.model).images.tile), ()
    if kind == "mixture":
        draw, words = mixture.sample, (OMNI, mixture.VOCABULARY)
    path.mkdir(parents=True)
    counts = {f"train-{n:04d}.tar": -(-samples // SHARDS) for n in range(SHARDS)}
    counts["val-0000.tar"] = max(8, samples // 50)
    workers = min(SHARDS, os.cpu_count())
    with ProcessPoolExecutor(workers) as pool:
        names, seeds = list(counts), range(len(counts))
        list(pool.map(partial(_write, path, draw), names, counts.values(), seeds))
    prepare(path, names)
    tokenizer = str(path / "tokenizer")
    write_tokenizer(Path(tokenizer), *words)
    survey = [sys.executable, str(DATA_TOOLS / "survey.py"), str(path), "--model", given.model]
    survey += ["--dynamic-resolution"] * given.dynamic_resolution
    survey += ["--tokenizer-model", tokenizer, "--workers", str(workers // 2)]
    subprocess.run(survey, check=True)
    return ["--data", f"energon:{path}", "--tokenizer-model", tokenizer]


def _write(
    path: Path, sample: Callable[[np.random.Generator], dict], name: str, count: int, seed: int
) -> None:
    """Write a shard of ``count`` samples."""
    draw = np.random.default_rng(seed)
    with webdataset.TarWriter(str(path / name), mtime=0) as tar:
        for number in range(count):
            tar.write({"__key__": f"{name[:-4]}-{number:06d}", **sample(draw)})


def _sample(draw: np.random.Generator, tile: int) -> dict:
    *_, chances = zip(*SHAPES, strict=True)
    columns, rows, _ = SHAPES[draw.choice(len(SHAPES), p=chances)]
    words = [" ".join(map(str, draw.integers(10, size=draw.integers(*WORDS)))) for _ in range(2)]
    question = ("<image>\n" if columns else "") + "copy " + words[0]
    sample = {"json": conversation(question, words[1])}
    if columns:
        coarse = draw.integers(256, size=(rows * 16, columns * 16, 3), dtype=np.uint8)
        size = (columns * tile, rows * tile)
        picture = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
        sample["jpg"] = image_bytes(picture, "JPEG")
    return sample
