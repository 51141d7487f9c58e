#!/usr/bin/env python3
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Write a small data set for --data energon: strips of handwritten digits to be read.

    tools/data/make_webdataset.py OUT --samples N --seed S [--tasks digits|omni]

OUT becomes a data set that is prepared for energon, with a tokenizer of 64 ids at most in
OUT/tokenizer. A strip has one to three of scikit-learn's digits (real 8×8 scans), beside or below
each other, as PNG or JPEG; a conversation asks for them. One sample in eight is text only: digits
to copy. An eighth of the samples is the part ``val``, whose scans are not in ``train``.

With --tasks omni, samples have words to read, tones to hear, clips to watch, or words to copy.
"""

import contextlib
import io
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from command_line import Parser, positive  # noqa: E402

try:
    import numpy as np
    import webdataset
    from PIL import Image
    from sklearn.datasets import load_digits
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    import omni_tasks
    from megatron.energon import BaseWebdatasetFactory
except ImportError as error:
    sys.exit(f"error: {error}; install with pip install '.[energon]'")

LENGTHS = (0.5, 0.3, 0.2)
"""Shares of the answers with one, two and three digits. A model first learns to see from strips of
one digit, then the order; with few such strips, it takes long to learn either."""
HEIGHTS = (12, 20)
"""Range of a digit's height in pixels: small, so that each digit is one 16-pixel tile."""
STRETCH = 0.06
"""Largest relative stretch or shrinkage of a strip's length."""
TEXT_ONLY = 1 / 8
HELD_OUT = 8
"""One in this many samples, and one in this many scans, is in the validation part."""

SPECIAL = ["<pad>", "<s>", "</s>", "<image>", "<user>", "<assistant>", "<unk>"]
WORDS = ["?", "read", "copy", *"0123456789", *"what digits are these them in order".split()]
OMNI = ["<img>", "</img>", "<so_start>", "<so_embedding>", "<so_end>"]
"""Special tokens of Nemotron 3 Nano Omni, beside ``<image>``."""
TEMPLATE = (
    "<s>{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "<assistant>{{ message['content'] }}</s>{% else %}<user>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def main(arguments: list[str] | None = None) -> int:
    """Write the data set; return the exit status, 2 if OUT exists already."""
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="a new directory")
    parser.add_argument("--samples", type=int, required=True, metavar="N", help="at least 8")
    parser.add_argument("--seed", type=int, required=True, metavar="S")
    parser.add_argument("--tasks", choices=["digits", "omni"], default="digits")
    parser.add_argument("--samples-per-shard", type=positive, default=1024, metavar="N")
    given = parser.parse_args(arguments)
    if given.samples < HELD_OUT:
        parser.error(f"--samples {given.samples}: at least {HELD_OUT}")
    if given.seed < 0:
        parser.error("--seed must be 0 or more")
    try:
        given.out.mkdir(parents=True)
    except OSError as error:
        is_there = isinstance(error, FileExistsError)
        why = "is there already; remove it first" if is_there else error.strerror
        print(f"error: {given.out}: {why}", file=sys.stderr)
        return 2
    scans = load_digits()
    held_out = np.arange(len(scans.target)) % HELD_OUT == 0
    sizes = {"train": given.samples - given.samples // HELD_OUT, "val": given.samples // HELD_OUT}
    shards = []
    for part, size in sizes.items():
        mine = held_out if part == "val" else ~held_out
        draw = np.random.default_rng([given.seed, part == "val"])
        for first in range(0, size, given.samples_per_shard):
            name = f"{part}-{first // given.samples_per_shard:04d}.tar"
            shards.append(name)
            with webdataset.TarWriter(str(given.out / name), mtime=0) as tar:
                for number in range(first, min(first + given.samples_per_shard, size)):
                    if given.tasks == "digits":
                        sample = _sample(draw, scans.images[mine], scans.target[mine])
                    else:
                        sample, *asked = omni_tasks.sample(draw)
                        sample["json"] = conversation(*asked)
                    tar.write({"__key__": f"{part}-{number:06d}", **sample})
    prepare(given.out, shards)
    more = (OMNI, omni_tasks.VOCABULARY) if given.tasks == "omni" else ()
    write_tokenizer(given.out / "tokenizer", *more)
    print(f"{given.out}: {sizes['train']} samples to train, {sizes['val']} held out")
    return 0


def prepare(path: Path, shards: list[str]) -> None:
    """Do what `energon prepare` does: write index, split by the shards' names, and dataset.yaml."""
    parts = [("train", "train-.*"), ("val", "val-.*")]
    with contextlib.redirect_stdout(io.StringIO()):
        BaseWebdatasetFactory.prepare_dataset(path, shards, split_parts_patterns=parts, workers=1)
    kind = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (path / ".nv-meta" / "dataset.yaml").write_text(kind)


def write_tokenizer(path: Path, special: Sequence[str] = (), more: Sequence[str] = ()) -> None:
    """Write a tokenizer of words and single digits, in which the digit d has the id 10 + d.

    Args:
        special: more special tokens.
        more: more words.
    """
    known = dict.fromkeys([*SPECIAL, *WORDS, *special, *more])
    words = {word: number for number, word in enumerate(known)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in [*SPECIAL, *special]]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    ).save_pretrained(path)


def _sample(draw: np.random.Generator, images: np.ndarray, digits: np.ndarray) -> dict:
    if draw.random() < TEXT_ONLY:
        text = " ".join(map(str, draw.integers(10, size=_length(draw))))
        return {"json": conversation(f"copy {text}", text)}
    chosen = draw.integers(len(images), size=_length(draw))
    name, kind = ("png", "PNG") if draw.random() < 0.5 else ("jpg", "JPEG")
    question = ("what digits are these ?", "read them in order")[int(draw.integers(2))]
    answer = " ".join(str(digits[i]) for i in chosen)
    strip = omni_tasks.image_bytes(_strip(draw, images[chosen]), kind)
    # The image comes last: with words after it, a tiny model takes long to learn to attend to it.
    return {name: strip, "json": conversation(f"{question}\n<image>", answer)}


def _length(draw: np.random.Generator) -> int:
    """Draw the number of digits of an answer."""
    return 1 + int(draw.choice(len(LENGTHS), p=LENGTHS))


def _strip(draw: np.random.Generator, scans: np.ndarray) -> Image.Image:
    """Draw digits beside or below each other, dark on light, of random size and stretch."""
    below = draw.random() < 0.5
    pixels = np.concatenate(scans, axis=0 if below else 1)
    strip = Image.fromarray((255 - pixels * 255 / 16).astype(np.uint8))
    height = draw.integers(HEIGHTS[0], HEIGHTS[1] + 1)
    length = round(height * len(scans) * (1 + draw.uniform(-STRETCH, STRETCH)))
    return strip.resize((height, length) if below else (length, height)).convert("RGB")


def conversation(*texts: str) -> bytes:
    """Write questions, each with the answer after it, as the JSON of a sample."""
    whose = itertools.cycle(("human", "gpt"))
    turns = [{"from": who, "value": text} for who, text in zip(whose, texts, strict=False)]
    return json.dumps({"conversations": turns}).encode()


if __name__ == "__main__":
    sys.exit(main())
