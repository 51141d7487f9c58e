# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Shards of samples like those that people fine-tune on: photos, screens, pages, clips and sounds.

What a picture shows does not matter to speed: it is a smooth field of random colours. Its size
matters, and the lengths of the conversation's turns, which have a long tail.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import webdataset
from PIL import Image

DATA_TOOLS = Path(__file__).resolve().parents[1] / "data"
sys.path.insert(0, str(DATA_TOOLS))

from make_webdataset import OMNI, conversation, prepare, write_tokenizer  # noqa: E402
from omni_tasks import image_bytes, sound_bytes  # noqa: E402

SHARDS = 16
"""Shards of the training part, which processes write and survey at the same time."""

VOCABULARY = tuple(map("".join, product(ascii_lowercase, repeat=2)))
"""Words, each of which is a token."""

WORDS = (5, 250)
"""Fewest and most words of a question or an answer."""

PHOTOS = ((640, 480), (480, 640), (640, 427), (612, 612), (500, 375), (1024, 768))
SCREENS = ((1280, 720), (1366, 768), (1920, 1080), (1170, 2532))
PAGES = ((850, 1100), (1240, 1754), (1700, 2200))
"""Width and height of pictures in pixels; of pages at 100, 150 and 200 dots an inch."""

KINDS = {PHOTOS: 0.5, SCREENS: 0.2, PAGES: 0.15, None: 0.15}
"""Shares of the kinds of pictures; None has any sides."""

SIDES = (200, 1600)
FRAMES, FRAME = (4, 13), (480, 270)
SECONDS = (2, 20)
RATE = 16000

SAMPLES = {"text": 0.15, "image": 0.62, "images": 0.15, "clip": 0.04, "sound": 0.04}
"""Shares of the kinds of samples; several images are two or three."""


def make(path: Path, samples: int, arguments: list[str]) -> list[str]:
    """Write shards, prepared for energon and surveyed, with a tokenizer.

    Args:
        path: a new directory.
        arguments: the program's, of which the last --model decides the sizes of images.

    Returns:
        The program's arguments for these data.
    """
    path.mkdir(parents=True)
    counts = {f"train-{n:04d}.tar": -(-samples // SHARDS) for n in range(SHARDS)}
    counts["val-0000.tar"] = max(8, samples // 50)
    workers, write = min(SHARDS, os.cpu_count()), partial(write_shard, path, sample)
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(write, counts, counts.values(), range(len(counts))))
    prepare(path, list(counts))
    tokenizer = str(path / "tokenizer")
    write_tokenizer(Path(tokenizer), OMNI, VOCABULARY)
    model = arguments[len(arguments) - arguments[::-1].index("--model")]
    survey = [sys.executable, str(DATA_TOOLS / "survey.py"), str(path), "--model", model]
    survey += ["--dynamic-resolution", "--tokenizer-model", tokenizer]
    subprocess.run([*survey, "--workers", str(workers // 2)], check=True)
    return ["--data", f"energon:{path}", "--tokenizer-model", tokenizer]


def write_shard(path: Path, sample: Callable, name: str, count: int, seed: int) -> None:
    """Write a shard of ``count`` samples, whose files ``sample`` draws."""
    draw = np.random.default_rng(seed)
    with webdataset.TarWriter(str(path / name), mtime=0) as tar:
        for number in range(count):
            tar.write({"__key__": f"{name[:-4]}-{number:06d}", **sample(draw)})


def sample(draw: np.random.Generator) -> dict[str, bytes]:
    """Draw the files of a sample."""
    kind = draw.choice(list(SAMPLES), p=list(SAMPLES.values()))
    files, asked = {}, ""
    if kind in ("image", "images"):
        count = 1 if kind == "image" else int(draw.integers(2, 4))
        files = {f"{number}.jpg": picture(draw, *_size(draw)) for number in range(count)}
        asked = "<image>\n" * count
    elif kind == "clip":
        frames = range(draw.integers(*FRAMES))
        files = {f"video.{number:02d}.jpg": picture(draw, *FRAME) for number in frames}
        asked = "<video>\n"
    elif kind == "sound":
        files, asked = {"wav": _noise(draw)}, "<sound>\n"
    first, *texts = (_words(draw) for _ in range(2 * draw.integers(1, 4)))
    return files | {"json": conversation(asked + first, *texts)}


def picture(draw: np.random.Generator, width: int, height: int) -> bytes:
    """Draw a smooth field of random colours as JPEG."""
    coarse = draw.integers(256, size=(9, 9, 3), dtype=np.uint8)
    return image_bytes(Image.fromarray(coarse).resize((width, height)), "JPEG")


def _size(draw: np.random.Generator) -> tuple[int, int]:
    sizes = list(KINDS)[draw.choice(len(KINDS), p=list(KINDS.values()))]
    return tuple(draw.integers(*SIDES, size=2) if sizes is None else draw.choice(sizes))


def _words(draw: np.random.Generator) -> str:
    """Draw a text; half of the texts have 37 words or fewer, one in six more than 120."""
    fewest, most = WORDS
    count = int(np.clip(draw.lognormal(3.6, 1.2), fewest, most))
    return " ".join(draw.choice(VOCABULARY, size=count))


def _noise(draw: np.random.Generator) -> bytes:
    return sound_bytes(draw.normal(0, 3000, (int(RATE * draw.uniform(*SECONDS)), 1)), RATE)
