# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Survey a data set and print the result: lengths of the samples, and which are bad."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from examples.mimo.nemotron_vlm.energon.conversation import IMAGE, Chat
from examples.mimo.nemotron_vlm.energon.encoding import Encoder
from examples.mimo.nemotron_vlm.energon.records import DEFAULT_PROMPT
from examples.mimo.nemotron_vlm.energon.store import PARTS, DataSet, EmptySplit, open_split
from examples.mimo.nemotron_vlm.energon.survey import (
    EXCLUDED,
    GOOD,
    STATES,
    Survey,
    load_survey,
    make_surveys,
)
from examples.mimo.nemotron_vlm.energon.tiling import Tiling

PERCENTILES = (0, 50, 90, 99, 100)


def main(arguments: list[str] | None = None) -> int:
    """Survey the splits; return the exit code, 2 if a split cannot be surveyed."""
    given = _parse(arguments)
    surveys = Path(given.surveys) if given.surveys else None
    try:
        chat = Chat(given.tokenizer, given.image_token)
        tiling = Tiling(given.tile, given.max_tiles, given.thumbnail)
        encoder = Encoder(chat, tiling, given.tokens_per_tile, given.prompt)
        for split in PARTS:
            try:
                opened = open_split(given.path, split)
            except EmptySplit as error:
                print(error)
                continue
            make_surveys(given.path, split, encoder, surveys, given.workers, given.again, _progress)
            for dataset in opened.datasets:
                survey = load_survey(dataset, encoder, surveys)
                print(describe(dataset, survey, opened.part, given.seq_length, given.names))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def describe(
    dataset: DataSet, survey: Survey, part: str, seq_length: int | None, names: int
) -> str:
    """Describe a data set's survey as lines of text.

    Args:
        part: energon's name of the surveyed part of the data set.
        seq_length: samples with more tokens are named; None names none.
        names: how many bad samples of each kind are named.
    """
    good = survey.state == GOOD
    tokens, tiles = survey.tokens[good], survey.tiles[good]
    lines = [
        f"{dataset.path} {part}: {len(good)} samples in {len(dataset.shards)} shards, "
        f"{len(tokens)} good, {int((tiles == 0).sum())} of them text only"
    ]
    if len(tokens):
        spread = np.percentile(tokens, PERCENTILES, method="nearest").tolist()
        at = (f"{percent} %: {value}" for percent, value in zip(PERCENTILES, spread, strict=True))
        lines.append(f"  tokens  {' · '.join(at)} · mean {tokens.mean():.1f}")
        counts = np.stack(np.unique(tiles, return_counts=True), axis=1).tolist()
        of = (f"{count} with {number}" for number, count in counts)
        lines.append(f"  tiles   {' · '.join(of)} · mean {tiles.mean():.2f}")
    for state in range(1, len(STATES)):
        bad = [f"{sample.name}: {sample.reason}" for sample in survey.bad if sample.state == state]
        if state == EXCLUDED:
            bad = [line.partition(": ")[0] for line in bad]
        lines += _listed(STATES[state], len(bad), bad[:names])
    if seq_length:
        long = np.flatnonzero(survey.tokens > seq_length)
        listed = [f"{dataset.name(int(i))}: {survey.tokens[i]} tokens" for i in long[:names]]
        lines += _listed(f"longer than {seq_length} tokens", len(long), listed)
    return "\n".join(lines)


def _listed(kind: str, count: int, names: list[str]) -> list[str]:
    if not count:
        return []
    more = [f"    … {count - len(names)} more (--names)"] if count > len(names) else []
    return [f"  {kind}: {count}", *(f"    {name}" for name in names), *more]


def _progress(done: int, shards: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{shards} shards", end="\n" if done == shards else "", file=sys.stderr)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", metavar="PATH", help="prepared data set, or metadataset.yaml")
    parser.add_argument("--tokenizer", metavar="DIR", required=True)
    parser.add_argument("--tile", type=int, required=True, help="height and width in pixels")
    parser.add_argument("--tokens-per-tile", type=int, required=True)
    parser.add_argument("--max-tiles", type=int, default=12, help="of an image, without thumbnail")
    parser.add_argument("--no-thumbnail", dest="thumbnail", action="store_false")
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="that asks for a caption")
    parser.add_argument("--image-token", default=IMAGE, help="of the tokenizer")
    parser.add_argument("--surveys", metavar="DIR", help="of the surveys; default: with the data")
    parser.add_argument("--workers", type=int, default=1, help="processes, a shard at a time")
    parser.add_argument("--again", action="store_true", help="e.g. after shards were replaced")
    parser.add_argument("--seq-length", type=int, help="name the samples that are longer")
    parser.add_argument("--names", type=int, default=20, help="bad samples to name, of each kind")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
