# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The page of a run: its curves and layouts, and what the model read in the last evaluation."""

from argparse import Namespace

from examples.mimo.common.errors import one_line
from examples.mimo.nemotron_vlm.data.sample import SampleSource
from examples.mimo.nemotron_vlm.loop.forward_step import Answers
from examples.mimo.nemotron_vlm.loop.metrics import numbers_of, read_metrics
from examples.mimo.nemotron_vlm.loop.page import Shown, write_page

SHOWN = 6
"""Most wrong samples, and most right ones, on the page."""

LOOKED_AT = 256
"""Samples of the evaluation among which wrong ones are looked for."""


def write_report(args: Namespace, source: SampleSource, answers: Answers) -> str:
    """Write the page that ``--report`` names; return its link, or why there is none.

    The run has ended well then, all the same.
    """
    try:
        records = read_metrics(args.metrics_out)
        layout = f"{args.placement}: encoder {args.encoder}, language {args.language}"
        facts = {"data": args.data, "layout": layout, "steps": str(len(records))}
        facts |= numbers_of(records[-1]) if records else {}
        title = f"{args.model} on {args.world_size} ranks"
        write_page(args.report, title, facts, readings(source, answers), records, args)
    except Exception as error:  # whatever a source of a user's raises
        return f"warning: no page: {one_line(error)}"
    return f"page: {args.report.absolute().as_uri()}"


def readings(source: SampleSource, answers: Answers) -> list[Shown]:
    """Return held-out samples that the model has read, up to `SHOWN` wrong ones and right ones."""
    read: dict[int, list[int]] = {}
    for (number, _), token in sorted(answers.items()):
        read.setdefault(number, []).append(token)
    found: dict[bool, list[Shown]] = {False: [], True: []}
    for number in list(read)[:LOOKED_AT]:
        text = source.text("test", number)
        labels = text.labels[text.loss_mask.bool()].tolist()
        is_right = read[number] == labels
        if len(found[is_right]) < SHOWN:
            question = source.shown("test", number)._replace(answer=source.words(labels))
            name, said = source.name("test", number), source.words(read[number])
            found[is_right].append(Shown(name, question, said, is_right))
    return found[False] + found[True]
