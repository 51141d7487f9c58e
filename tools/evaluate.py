#!/usr/bin/env python3
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Ask a trained model about the held-out samples of its data, and score its answers.

    tools/evaluate.py CHECKPOINT [--data DATA] [--samples N] [--out PAGE.html]

CHECKPOINT is a directory that the program saved to, or DIR/best. Prints scores as JSON. The page
shows each sample, the wrong ones first, and opens without a server.
"""

import json
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent / name) for name in ("checkpoint", ".")]

from command_line import BATCH, DEVICE, Parser, positive  # noqa: E402
from in_checkout import run  # noqa: E402


def main(argv: list[str]) -> int:
    """Evaluate; return the exit status, 2 for user errors."""
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="directory that the program saved to")
    add("--data", metavar="DATA", help="as the program takes it; by default the run's")
    what = "held-out samples; 100 by default, 0 shows the run alone"
    add("--samples", type=partial(positive, least=0), default=100, metavar="N", help=what)
    add("--max-tokens", type=positive, default=256, metavar="N", help="of an answer")
    add("--batch", type=positive, default=BATCH, metavar="N", help="questions answered at a time")
    what = "page to write; evaluation.html by default"
    add("--out", type=Path, default=Path("evaluation.html"), metavar="FILE", help=what)
    add("--device", choices=("cpu", "cuda"), help=DEVICE)
    options = parser.parse_args(argv)
    return run(lambda: _evaluate(options), options.device)


def _evaluate(options: Namespace) -> None:
    from generate import converted
    from judging import mean_scores, scores_of
    from tqdm import tqdm

    from conversion.their_model import Conversation, question_of
    from conversion.torch_dist import Checkpoint
    from conversion.whole_models import preset_of_run
    from examples.mimo.common.errors import UserError
    from examples.mimo.nemotron_vlm.data import make_source
    from examples.mimo.nemotron_vlm.loop.metrics import read_metrics
    from examples.mimo.nemotron_vlm.loop.page import Shown, write_page

    options.out.parent.mkdir(parents=True, exist_ok=True)  # before the questions, not after
    if options.out.is_dir():
        raise UserError(f"--out {options.out} is a folder")
    saved = Checkpoint(options.checkpoint)
    args = saved.options
    args.data = options.data or args.data
    source = make_source(args, preset_of_run(args))
    samples = list(_questions(source, options.samples))
    asked = [(name, question) for name, question in samples if question]
    records = (
        question_of(question.text, _files(question))._replace(arguments=question.asked)
        for _, question in asked
    )
    model = Conversation(converted(saved.directory), {}) if asked else None
    answers = (
        model.answers(records, options.batch, max_new_tokens=options.max_tokens) if model else ()
    )
    shown, scores = [], []
    for (name, question), text in zip(asked, tqdm(answers, total=len(asked)), strict=True):
        said = text.rpartition("</think>")[2].strip()
        scores.append(scores_of(said, question.answer))
        shown.append(Shown(name, question, said, scores[-1]["normalized_match"] == 1))
    found = {"samples": len(asked), "not_asked": len(samples) - len(asked)} | mean_scores(scores)
    print(json.dumps(found))
    facts = {name.replace("_", " "): f"{value:.3g}" for name, value in found.items()}
    steps = read_metrics(Path(args.metrics_out)) if args.metrics_out else []
    write_page(options.out, str(saved.directory), facts, shown, steps, args)
    print(f"page: {options.out.absolute().as_uri()}", file=sys.stderr)


def _questions(source, count: int):
    """Yield name and question of held-out samples, each once; None for one with several turns."""
    names: set[str] = set()
    for number in range(count):
        name = source.name("test", number)
        if name in names:  # the second epoch
            return
        names.add(name)
        yield name, source.question("test", number)


def _files(question) -> list:
    from examples.mimo.nemotron_vlm.energon.conversation import PLACEHOLDERS
    from examples.mimo.nemotron_vlm.energon.records import Medium

    kinds = {placeholder.strip("<>"): kind for kind, placeholder in PLACEHOLDERS.items()}
    return [Medium(kinds[kind], tuple(files.values())) for kind, files in question.media]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
