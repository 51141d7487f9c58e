# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Survey a data set and print the result: lengths of the samples, and which are bad."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from examples.mimo.nemotron_vlm.data.clip_grids import ClipGrids
from examples.mimo.nemotron_vlm.data.patch_grids import PatchGrids
from examples.mimo.nemotron_vlm.data.sample import SOUND
from examples.mimo.nemotron_vlm.energon.advice import advise
from examples.mimo.nemotron_vlm.energon.conversation import IMAGE, VIDEO, Chat
from examples.mimo.nemotron_vlm.energon.encoding import Encoder
from examples.mimo.nemotron_vlm.energon.errors import MissingPackage
from examples.mimo.nemotron_vlm.energon.images import Resizing, Tiling
from examples.mimo.nemotron_vlm.energon.records import DEFAULT_PROMPT
from examples.mimo.nemotron_vlm.energon.sounds import Listening
from examples.mimo.nemotron_vlm.energon.store import PARTS, DataSet, EmptySplit, open_split
from examples.mimo.nemotron_vlm.energon.survey import (
    GOOD,
    STATES,
    TOO_LONG,
    Survey,
    bad_samples,
    load_survey,
    make_survey,
)
from examples.mimo.nemotron_vlm.energon.videos import Watching

_SENT = f"{MissingPackage.__module__}.{MissingPackage.__name__}: "

PERCENTILES = (0, 50, 90, 99, 100)


def main(arguments: list[str] | None = None) -> int:
    """Survey the splits; return the exit code, 2 if a split cannot be surveyed."""
    given = _parse(arguments)
    try:
        sound = Listening(given.sound) if given.sound else None
        chat = Chat(given.tokenizer, given.image_token, sound is not None)
        if given.patch:
            bounds = given.min_patches, given.max_patches
            images = Resizing(PatchGrids(given.patch, given.pixel_shuffle, *bounds))
        else:
            images = Tiling(given.tile, given.max_tiles, given.thumbnail)
        per_tile = 1 if given.patch else given.tokens_per_tile
        video = None
        if given.video:
            clips = ClipGrids(given.patch, given.pixel_shuffle, given.tubelet, given.video)
            video = Watching(clips, given.video_frames, given.video_fps)
        encoder = Encoder(chat, images, per_tile, given.prompt, sound, video)
        for split in PARTS:
            try:
                datasets = open_split(given.path, split).datasets
            except EmptySplit as error:
                print(error)
                continue
            for dataset in datasets:
                if given.again or load_survey(dataset, encoder, given.surveys) is None:
                    make_survey(dataset, encoder, given.surveys, given.workers)
                survey = load_survey(dataset, encoder, given.surveys)
                print(describe(dataset, survey, split, given, encoder))
    except (ValueError, MissingPackage) as error:
        line = str(error).splitlines()[-1]  # a process of its own sends its traceback along
        print(f"error: {line.removeprefix(_SENT)}", file=sys.stderr)
        return 2
    return 0


def describe(
    dataset: DataSet, survey: Survey, split: str, given: argparse.Namespace, encoder: Encoder
) -> str:
    """Describe what a survey says of the samples that a blend takes, as lines of text.

    Args:
        given: the tool's arguments.
    """
    seq_length, names = given.seq_length, given.names
    subset = slice(dataset.subset.start, dataset.subset.stop)
    good = survey.state[subset] == GOOD
    chosen = np.arange(subset.start, subset.stop)[good]
    tokens, inputs = survey.tokens[chosen], survey.inputs[chosen]
    alone = np.diff(survey.media_ends, prepend=0)[subset][good] == 0
    lines = [
        f"{dataset.path} {split}: {len(good)} samples in {len(dataset.shards)} shards, "
        f"{len(tokens)} good, {int(alone.sum())} of them text only"
    ]
    if len(tokens):
        spread = np.percentile(tokens, PERCENTILES, method="nearest").tolist()
        at = (f"{percent} %: {value}" for percent, value in zip(PERCENTILES, spread, strict=True))
        lines.append(f"  tokens  {' · '.join(at)} · mean {tokens.mean():.1f}")
        counts = np.stack(np.unique(inputs, return_counts=True), axis=1).tolist()
        of = (f"{count} with {number}" for number, count in counts)
        kind = "images" if given.patch else "tiles"
        lines.append(f"  {kind:6}  {' · '.join(of)} · mean {inputs.mean():.2f}")
        for kind in filter(vars(given).get, (VIDEO, SOUND)):
            lines.append(f"  {kind:6}  {survey.count(chosen, kind)}")
        lines += advise(survey, encoder, chosen) if split == "train" else []
    bad = bad_samples(dataset, survey, seq_length, names)
    cut = int((survey.needed[chosen][tokens > seq_length] <= seq_length).sum())
    for state, count in enumerate(np.bincount(survey.states(seq_length)[subset])):
        if state != GOOD and count:
            named = [sample for sample in bad if sample.state == state][:names]
            more = f", of which --long-samples cut keeps {cut}" * (state == TOO_LONG)
            lines.append(f"  {STATES[state]}: {count}{more}")
            lines += [f"    {sample.name}: {sample.reason}" for sample in named]
    return "\n".join(lines)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("path", metavar="PATH", help="prepared data set, or metadataset.yaml")
    add("--tokenizer", metavar="DIR", required=True)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--tile", type=int, help="height and width of tiles in pixels")
    kind.add_argument("--patch", type=int, help="those of patches, for --dynamic-resolution")
    add("--tokens-per-tile", type=int, help="needed with --tile")
    add("--pixel-shuffle", type=int, default=2, help="of images of any size")
    add("--min-patches", type=int, default=1024, help="of images of any size")
    add("--max-patches", type=int, default=13312, help="of images of any size")
    what = "survey sounds, so many log-mel frames of which become a token (8)"
    add("--sound", type=int, nargs="?", const=8, metavar="FRAMES", help=what)
    what = "survey clips with --patch, whose frames have about so many patches (1024)"
    add("--video", type=int, nargs="?", const=1024, metavar="PATCHES", help=what)
    add("--tubelet", type=int, default=2, help="frames that become rows together")
    add("--video-frames", type=int, help="of a clip")
    add("--video-fps", type=float, help="frames of a clip in a second")
    add("--max-tiles", type=int, default=12, help="of an image, without thumbnail")
    add("--no-thumbnail", dest="thumbnail", action="store_false")
    add("--prompt", default=DEFAULT_PROMPT, help="that asks for a caption")
    add("--image-token", default=IMAGE, help="of the tokenizer")
    add("--surveys", type=Path, metavar="DIR", help="of the surveys; default: with the data")
    add("--workers", type=int, default=0, help="processes, a shard at a time; 0: this one")
    add("--again", action="store_true", help="e.g. after shards were replaced")
    add("--seq-length", type=int, default=1 << 40, help="name the samples that are longer")
    add("--names", type=int, default=20, help="bad samples to name, of each kind")
    given = parser.parse_args(arguments)
    if given.tile and not given.tokens_per_tile:
        parser.error("--tile needs --tokens-per-tile")
    if given.video and not given.patch:
        parser.error("--video needs --patch")
    if given.patch and not 0 < given.pixel_shuffle**2 <= given.min_patches <= given.max_patches:
        parser.error("--pixel-shuffle squared, --min-patches and --max-patches must ascend")
    return given


if __name__ == "__main__":
    sys.exit(main())
