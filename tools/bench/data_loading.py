# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Measure how long steps wait for data with N loading processes, and what balancing rows saves.

It makes a data set of JPEG pictures, most of one tile and few of a dozen, with some samples of text
alone; surveys it; and trains on it with each number of loading processes, and in the stream's
order. A table has, for each run, the median step, the share of it that the last rank waits for
data, and the step relative to the first run's.

Usage, in the checkout's environment (PYTHONPATH), after `pip install '.[energon]'`:
    python tools/bench/data_loading.py --ranks 2 --workers 2,0,4 -- --pack --device cuda --bf16 \
        --model nano-vl-30b-a3b --hybrid-layer-pattern 'MEMEM*EM' --num-layers 8 --num-experts 16 \
        --vocab-size 32768 --seq-length 4096 --global-batch-size 16 --encoder dp=2 --language dp=2
On CPU ranks, the gain of balancing shows only if each has a core and the model's computation takes
most of a step.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import webdataset
from PIL import Image

from examples.mimo.nemotron_vlm.model.presets import find_preset

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "data"))

from make_digits_webdataset import prepare, write_tokenizer  # noqa: E402

PROGRAM = "examples/mimo/pretrain_nemotron_vlm.py"

SHAPES = [(1, 1, 0.55), (2, 1, 0.15), (2, 2, 0.1), (3, 1, 0.05), (3, 4, 0.05), (0, 0, 0.1)]
"""Columns and rows of tiles of a picture, and its probability; 0 by 0 is text alone."""

WORDS = (4, 40)
"""Fewest words of a question or an answer, and one more than the most."""

WARM_UP = 3
"""Steps that are not counted."""


def main(arguments: list[str]) -> int:
    """Make the data, carry out the runs, and print the table."""
    own, program = _arguments(arguments)
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "pictures"
        tile, tokens = _sizes(program)
        make_pictures(data, own.samples, tile)
        survey = [sys.executable, str(ROOT / "tools" / "data" / "survey.py"), str(data)]
        sizes = ["--tile", str(tile), "--tokens-per-tile", str(tokens)]
        tokenizer = ["--tokenizer", str(data / "tokenizer"), "--workers", str(own.survey_workers)]
        subprocess.run([*survey, *tokenizer, *sizes], check=True)
        workers = own.workers.split(",")
        runs = {f"{n} loading processes": ["--num-workers", n] for n in workers}
        runs["the stream's order"] = ["--num-workers", workers[0], "--no-balance"]
        found = {}
        for name, options in runs.items():
            out = Path(directory) / "metrics.jsonl"
            launch = ["-m", "torch.distributed.run", "--standalone"]
            launch += ["--nproc-per-node", str(own.ranks), PROGRAM]
            of_data = ["--data", f"energon:{data}", "--tokenizer-model", str(data / "tokenizer")]
            rest = ["--micro-batch-size", "1", "--train-iters", str(own.steps)]
            rest += ["--metrics-out", str(out), "--seed", "1"]
            command = [sys.executable, *launch, *of_data, *rest, *program, *options]
            checkout = ROOT / "build" / "Megatron-LM"
            subprocess.run(command, check=True, cwd=os.environ.get("CHECKOUT", checkout))
            found[name] = [json.loads(line) for line in out.read_text().splitlines()]
            print(row(name, found[name], next(iter(found.values()))), flush=True)
    return 0


def row(name: str, records: list[dict], first: list[dict]) -> str:
    """Return a run's line of the table."""
    counted = records[WARM_UP:]
    step = statistics.median(record["step_time_s"] for record in counted)
    waited = sum(r["data_wait_s"] for r in counted) / sum(r["step_time_s"] for r in counted)
    reference = statistics.median(record["step_time_s"] for record in first[WARM_UP:])
    return f"{name:24} {step:8.3f} s a step {waited:7.2%} waiting {step / reference:7.3f}"


def make_pictures(path: Path, samples: int, tile: int) -> None:
    """Write shards of pictures with questions, prepared for energon, with a tokenizer."""
    path.mkdir(parents=True)
    draw = np.random.default_rng(0)
    shards = []
    for part, count in (("train", samples), ("val", max(8, samples // 50))):
        shards.append(f"{part}-0000.tar")
        with webdataset.TarWriter(str(path / shards[-1]), mtime=0) as tar:
            for number in range(count):
                tar.write({"__key__": f"{part}-{number:06d}", **_sample(draw, tile)})
    prepare(path, shards)
    write_tokenizer(path / "tokenizer")


def _sample(draw: np.random.Generator, tile: int) -> dict:
    *_, chances = zip(*SHAPES, strict=True)
    columns, rows, _ = SHAPES[draw.choice(len(SHAPES), p=chances)]
    words = [" ".join(map(str, draw.integers(10, size=draw.integers(*WORDS)))) for _ in range(2)]
    picture = "<image>\n" if columns else ""
    turns = [
        {"from": "human", "value": picture + "copy " + words[0]},
        {"from": "gpt", "value": words[1]},
    ]
    sample = {"json": json.dumps({"conversations": turns}).encode()}
    if columns:
        coarse = draw.integers(256, size=(rows * 16, columns * 16, 3), dtype=np.uint8)
        size = (columns * tile, rows * tile)
        file = io.BytesIO()
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(file, "JPEG")
        sample["jpg"] = file.getvalue()
    return sample


def _sizes(program: list[str]) -> tuple[int, int]:
    """Return the pixels and tokens of a tile for the model that the program's options name."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", default="tiny")
    encoder = find_preset(parser.parse_known_args(program)[0].model).encoder
    return encoder.tile, encoder.tokens_per_tile


def _arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    place = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workers", default="2,0", help="loading processes of each run")
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--survey-workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=13)
    return parser.parse_args(arguments[:place]), arguments[place + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
