# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Survey a data set and print the result: lengths of the samples, and which are bad."""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np

from examples.mimo.common.config_file import with_config
from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import option_of, table
from examples.mimo.nemotron_vlm.data import PREPARATION, make_encoder
from examples.mimo.nemotron_vlm.data.reading_options import (
    ReadingOptions,
    add_options,
    media_violation,
    preset_of,
)
from examples.mimo.nemotron_vlm.data.rows import Packing, best_fit
from examples.mimo.nemotron_vlm.energon.chat_template import MODES
from examples.mimo.nemotron_vlm.energon.conversation import VIDEO
from examples.mimo.nemotron_vlm.energon.encoding import Encoder
from examples.mimo.nemotron_vlm.energon.errors import MissingPackage
from examples.mimo.nemotron_vlm.energon.files import FileSet
from examples.mimo.nemotron_vlm.energon.images import Tiling
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
from examples.mimo.nemotron_vlm.model.names import IMAGES, SOUND

_SENT = rf"{MissingPackage.__module__}\.\w+: "

PERCENTILES = (0, 50, 90, 99, 100)
"""Percentiles of samples that are shown; advice has all but the least."""

KEPT = 0.99
"""Share of samples that the recommended length keeps, and of images to keep their size."""

WINDOWS = 16
"""Windows of samples that are packed to see how much padding is left."""

DECIDE = ("model", *PREPARATION, "surveys")
"""Options of the training that decide what a survey says and where it is kept."""


def main(arguments: list[str] | None = None) -> int:
    """Survey the splits; return the exit code, 2 if a split cannot be surveyed."""
    try:
        given = _parse(arguments)
        preset = preset_of(given)
        if broken := media_violation(given, preset):
            raise UserError(broken)
        encoder = make_encoder(given, preset)
        for split in PARTS:
            try:
                _, datasets, part = open_split(given.path, split)
            except EmptySplit as error:
                print(error)
                continue
            for dataset in datasets:
                # A name of a survey hashes records, not the files of their media.
                is_new = given.again or isinstance(dataset, FileSet)
                survey = None if is_new else load_survey(dataset, encoder, given.surveys)
                survey = survey or make_survey(
                    dataset, encoder, given.surveys, given.workers, given.again
                )
                print(describe(dataset, survey, part, given, encoder))
    except (UserError, ValueError, OSError) as error:
        # A process of its own sends its traceback along; some errors have no text.
        line = (str(error).splitlines() or [type(error).__name__])[-1]
        print(f"error: {re.sub(_SENT, '', line, count=1)}", file=sys.stderr)
        return 2
    return 0


def describe(
    dataset: DataSet, survey: Survey, split: str, given: argparse.Namespace, encoder: Encoder
) -> str:
    """Describe what a survey says of the samples that a blend takes, as lines of text."""
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
        kind = "tiles" if isinstance(encoder.images, Tiling) else "images"
        lines.append(f"  {kind:6}  {' · '.join(of)} · mean {inputs.mean():.2f}")
        for kind, is_taken in ((VIDEO, encoder.video), (SOUND, encoder.subsampling)):
            if is_taken:
                lines.append(f"  {kind:6}  {survey.media_in(chosen, [kind])[1].sum()}")
        asked = np.bincount(survey.asked[chosen], minlength=len(MODES) + 1).tolist()
        ways = [*(json.dumps(mode) for mode in MODES), "no prompt begins their answers"]
        ways[0] = "the template's prompt"
        counts = (f"{n}: {way}" for n, way in zip(asked, ways, strict=True) if n)
        lines.append(f"  asked   {' · '.join(counts)}")
        packing = Packing(given.pack_window, given.sample_multiple)
        lines += _advice(survey, encoder, chosen, packing) if split == "train" else []
    bad = bad_samples(dataset, survey, seq_length, names)
    cut = int((survey.needed[chosen][tokens > seq_length] <= seq_length).sum())
    for state, count in enumerate(np.bincount(survey.states(seq_length)[subset])):
        if state != GOOD and count:
            named = [sample for sample in bad if sample.state == state][:names]
            more = f", of which --long-samples cut keeps {cut}" * (state == TOO_LONG)
            lines.append(f"  {STATES[state]}: {count}{more}")
            lines += [f"    {sample.name}: {sample.reason}" for sample in named]
    return "\n".join(lines)


def _advice(survey: Survey, encoder: Encoder, chosen: np.ndarray, packing: Packing) -> list[str]:
    """Return lines with a table of sequence lengths to train with, one of bounds of images, and a
    recommendation.

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
    return np.percentile(values, PERCENTILES[1:], method="higher").astype(np.int64).tolist()


def _packed_padding(tokens: np.ndarray, length: int, packing: Packing) -> float:
    """Return the share of padding in packed rows, as the first windows have it."""
    size = packing.window
    windows = [tokens[i : i + size] for i in range(0, len(tokens), size)][:WINDOWS]
    padded = (best_fit(packing.padded(each).tolist(), length) for each in windows)
    return 1 - sum(each.sum() for each in windows) / (sum(map(len, padded)) * length)


def command(path: str, args: argparse.Namespace) -> str:
    """Return the command that makes the survey for a training's options."""
    words = ["python", "-m", __package__, path]
    for name in DECIDE:
        value, option = getattr(args, name), option_of(name)
        if value == getattr(ReadingOptions, name, None):
            continue
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--disable-", 1))
        else:
            words += [option, str(value)]
    return shlex.join(words)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="Give the options of the training that decide what it reads: --model, "
        "--dynamic-resolution, --max-tiles, --video-fps and so on.",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help="prepared data set, or metadataset.yaml")
    parser.add_argument("--tokenizer-model", metavar="DIR", required=True)
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that take a shard at a time; 0: this one"
    )
    parser.add_argument("--again", action="store_true", help="e.g. after shards were replaced")
    parser.add_argument(
        "--seq-length", type=int, default=1 << 40, help="name the samples that are longer"
    )
    parser.add_argument("--names", type=int, default=20, help="bad samples to name, of each kind")
    add_options(parser, ReadingOptions)
    words = sys.argv[1:] if arguments is None else arguments
    given = parser.parse_args(with_config(words, parser))
    given.surveys = given.surveys and Path(given.surveys)
    return given


if __name__ == "__main__":
    sys.exit(main())
