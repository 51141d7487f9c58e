# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measure a survey on one core, and an index of many packed samples: its start and a resume.

python tools/bench/data.py [--samples N] [--json FILE]        with PYTHONPATH as for vlm.py
"""

import argparse
import io
import json
import time
import tracemalloc
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import mixture
import numpy as np
import webdataset

from examples.mimo.nemotron_vlm.data.rows import Packing, Rows
from examples.mimo.nemotron_vlm.energon.__main__ import main as survey
from examples.mimo.nemotron_vlm.energon.stream import Stream
from examples.mimo.nemotron_vlm.energon.survey import MEDIA, Survey

SURVEYED = {"photos": 800, "texts": 4000}
SEQ_LENGTH = 6144


def main() -> None:
    """Print each figure, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000_000, help="of the index")
    parser.add_argument("--json", type=Path)
    own = parser.parse_args()
    with TemporaryDirectory() as directory:
        path = Path(directory)
        surveyed(path, "none", 8)  # imports libraries
        figures = {f"{k} a second": surveyed(path, k, n) for k, n in SURVEYED.items()}
        figures |= indexed(path / "index.npy", own.samples)
    print(*(f"{name}: {figure:.3g}" for name, figure in figures.items()), sep="\n")
    if own.json:
        own.json.write_text(json.dumps({"samples": own.samples, **figures}, indent=1) + "\n")


def surveyed(path: Path, kind: str, count: int) -> float:
    """Write shards of samples and survey them by one process; return the samples a second."""
    draw, path = np.random.default_rng(0), path / kind
    path.mkdir()
    for split, number in (("train", count), ("val", 1)):
        with webdataset.TarWriter(str(path / f"{split}-0.tar"), mtime=0) as tar:
            for key in range(number):
                photo = mixture.picture(draw, *draw.choice(mixture.PHOTOS))
                text = "".join(draw.choice(mixture.VOCABULARY, size=90) + " ")
                asked = "<image>\n" * (kind == "photos")
                turns = [{"from": "human", "value": f"{asked}{text}"}]
                turns += [{"from": "gpt", "value": "yes"}]
                files = {"json": json.dumps({"conversations": turns}).encode()}
                files |= {"jpg": photo} if asked else {}
                tar.write({"__key__": f"{split}-{key:06d}", **files})
    mixture.prepare(path, ["train-0.tar", "val-0.tar"])
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
    tracemalloc.start()
    seconds, stream = timed(lambda: Stream(pairs, False, SEQ_LENGTH, (0, "train"), False))
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    row = int(table[1][table[1] <= SEQ_LENGTH].sum()) // SEQ_LENGTH // 2  # in mid-epoch
    costs = Namespace(costs=lambda _, at, count: stream.costs(at, count))
    packed = partial(Rows, costs, "train", SEQ_LENGTH, Packing())
    counting, place = timed(lambda: packed().window_of(row))
    resume, _ = timed(lambda: packed(start=place).samples(row, 1))
    return {
        "start s": seconds,
        "start MB kept": kept / 1e6,
        "start MB at the peak": peak / 1e6,
        "resume at a checkpoint's window s": resume,
        "resume without the window s": counting,
    }


def timed(call: Callable[[], object]) -> tuple[float, object]:
    """Return the seconds of a call, and its result."""
    begun = time.perf_counter()
    result = call()
    return time.perf_counter() - begun, result


if __name__ == "__main__":
    main()
