# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measure a survey on one core, and an index of many packed samples: its start and a resume.

python tools/bench/data.py [--json FILE]        with PYTHONPATH as for vlm.py
"""

import argparse
import io
import json
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import mixture
import numpy as np

from examples.mimo.nemotron_vlm.data.rows import Packing, Rows
from examples.mimo.nemotron_vlm.energon.__main__ import main as survey
from examples.mimo.nemotron_vlm.energon.stream import Stream
from examples.mimo.nemotron_vlm.energon.survey import MEDIA, Survey

SEQ_LENGTH = 6144
SAMPLES = 10_000_000
"""Samples of the index."""


def photo(draw: np.random.Generator) -> dict[str, bytes]:
    """Draw the files of a sample with a photo."""
    taken = mixture.picture(draw, *draw.choice(mixture.PHOTOS))
    return {"jpg": taken, "json": text(draw, "<image>\n")["json"]}


def text(draw: np.random.Generator, asked: str = "") -> dict[str, bytes]:
    """Draw the file of a sample with 90 words."""
    words = " ".join(draw.choice(mixture.VOCABULARY, size=90))
    return {"json": mixture.conversation(asked + words, "yes")}


def main() -> None:
    """Print each figure, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    own = parser.parse_args()
    with TemporaryDirectory() as directory:
        path = Path(directory)
        surveyed(path / "none", text, 8)  # imports libraries
        figures = {
            "samples": SAMPLES,
            "photos a second": surveyed(path / "photos", photo, 800),
            "texts a second": surveyed(path / "texts", text, 4000),
            **indexed(path / "index.npy", SAMPLES),
        }
    print(*(f"{name}: {figure:.3g}" for name, figure in figures.items()), sep="\n")
    if own.json:
        own.json.write_text(json.dumps(figures, indent=1) + "\n")


def surveyed(path: Path, sample: Callable, count: int) -> float:
    """Write shards of samples and survey them by one process; return the samples a second."""
    path.mkdir()
    shards = {"train-0.tar": count, "val-0.tar": 1}
    for name, number in shards.items():
        mixture.write_shard(path, sample, name, number, seed=0)
    mixture.prepare(path, list(shards))
    mixture.write_tokenizer(path / "tokenizer", mixture.OMNI, mixture.VOCABULARY)
    command = [str(path), "--workers", "0", "--model", "nano-omni-30b-a3b"]
    command += ["--dynamic-resolution", "--tokenizer-model", str(path / "tokenizer")]
    with redirect_stdout(io.StringIO()):
        seconds, _ = timed(lambda: survey(command))
    return count / seconds


def indexed(path: Path, samples: int) -> dict[str, float]:
    """Return the figures of an index of records with a median of 90 tokens."""
    draw, table = np.random.default_rng(0), np.zeros((7, samples), np.int32)
    table[0] = draw.random(samples) < 0.02
    table[1] = draw.lognormal(4.5, 1.7, samples).astype(np.int32) + 2
    np.save(path, table)
    records = Survey(*np.load(path, mmap_mode="r"), np.zeros(0, MEDIA), "hash", None)
    pairs = [(SimpleNamespace(subset=range(samples), weight=None, path="data"), records)]
    seconds, stream = timed(lambda: Stream(pairs, False, SEQ_LENGTH, (0, "train"), False))
    row = int(table[1][table[1] <= SEQ_LENGTH].sum()) // SEQ_LENGTH // 2  # in mid-epoch
    costs = Namespace(costs=lambda _, at, count: stream.costs(at, count))
    packed = partial(Rows, costs, "train", SEQ_LENGTH, Packing())
    place = packed().window_of(row)
    resume, _ = timed(lambda: packed(start=place).samples(row, 1))
    return {"start s": seconds, "resume at a checkpoint's window s": resume}


def timed(call: Callable[[], object]) -> tuple[float, object]:
    """Return the seconds of a call, and its result."""
    begun = time.perf_counter()
    result = call()
    return time.perf_counter() - begun, result


if __name__ == "__main__":
    main()
