# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Make a data set whose samples differ in work: pictures of one to thirteen tiles, and text."""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import webdataset
from PIL import Image

from examples.mimo.nemotron_vlm.model.presets import find_preset

DATA_TOOLS = Path(__file__).resolve().parents[1] / "data"
sys.path.insert(0, str(DATA_TOOLS))

from make_webdataset import conversation, prepare, write_tokenizer  # noqa: E402
from omni_tasks import image_bytes  # noqa: E402

SHAPES = [(1, 1, 0.55), (2, 1, 0.15), (2, 2, 0.1), (3, 1, 0.05), (3, 4, 0.05), (0, 0, 0.1)]
"""Columns and rows of tiles of a picture, and its probability; 0 by 0 is text alone."""

WORDS = (4, 40)
"""Fewest words of a question or an answer, and one more than the most."""


def make(path: Path, samples: int, arguments: list[str]) -> list[str]:
    """Write shards, prepared for energon and surveyed, with a tokenizer.

    Args:
        path: a new directory.
        arguments: the program's, of which the model decides the sizes of tiles.

    Returns:
        The program's arguments for these data.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", default="tiny")
    model = parser.parse_known_args(arguments)[0].model
    tile = find_preset(model).images.tile
    path.mkdir(parents=True)
    draw = np.random.default_rng(0)
    shards = []
    for part, count in (("train", samples), ("val", max(8, samples // 50))):
        shards.append(f"{part}-0000.tar")
        with webdataset.TarWriter(str(path / shards[-1]), mtime=0) as tar:
            for number in range(count):
                tar.write({"__key__": f"{part}-{number:06d}", **_sample(draw, tile)})
    prepare(path, shards)
    tokenizer = str(path / "tokenizer")
    write_tokenizer(Path(tokenizer))
    survey = [sys.executable, str(DATA_TOOLS / "survey.py"), str(path), "--model", model]
    subprocess.run([*survey, "--tokenizer-model", tokenizer], check=True)
    return ["--data", f"energon:{path}", "--tokenizer-model", tokenizer]


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
