#!/usr/bin/env python3
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Ask a trained model about images, sounds and clips; transformers generates the answer.

    tools/generate.py CHECKPOINT --image FILE --ask TEXT

CHECKPOINT is a directory that the program saved to, LoRA runs too, or a Hugging Face directory that
was converted, or one of peft's adapters that names such a directory as its base.
Without --ask, questions are read from the terminal, one a line, in one conversation.
"""

import argparse
import json
import sys
from argparse import Namespace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent / name) for name in ("checkpoint", ".")]

from command_line import Parser, positive  # noqa: E402
from in_checkout import run  # noqa: E402

KINDS = {"image": "an image", "sound": "a sound", "video": "a clip, or a folder of frames"}
"""Options of media, and their help."""


def main(argv: list[str]) -> int:
    """Answer; return the exit status, 2 for user errors."""
    options = _parser().parse_args(argv)
    return run(lambda: _answer(options))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="of the program, or of Hugging Face")
    for name, what in KINDS.items():
        add(f"--{name}", action="append", default=[], type=Path, metavar="FILE", help=what)
    add("--ask", metavar="TEXT", help="the question; <image>, <sound>, <video> place the media")
    add("--step", type=positive, metavar="N", help="take this step's checkpoint, not the newest")
    what = 'of the chat template, as JSON: {"enable_thinking": false}; else as in training'
    add("--chat-template-kwargs", type=json.loads, metavar="JSON", help=what)
    add("--max-tokens", type=positive, default=256, metavar="N", help="of an answer")
    return parser


def _answer(options: Namespace) -> None:
    from conversion.their_model import Conversation
    from examples.mimo.common.errors import UserError
    from examples.mimo.nemotron_vlm.energon.errors import BadConversation, BadMedium

    try:
        files = _files(options)
        directory = converted(options.checkpoint, options.step)
        model = Conversation(directory, options.chat_template_kwargs)
        if options.ask is not None:
            print(model.ask(options.ask, files, options.max_tokens))
            return
        while question := _next_question():
            print(model.ask(question, files, options.max_tokens))
            files = []
    except (BadConversation, BadMedium) as error:
        raise UserError(str(error)) from error


def _next_question() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _files(options: Namespace) -> list:
    """Read the files of all media."""
    from examples.mimo.common.errors import UserError
    from examples.mimo.nemotron_vlm.energon.conversation import VIDEO
    from examples.mimo.nemotron_vlm.energon.records import Medium, numerically
    from examples.mimo.nemotron_vlm.model.names import IMAGES, SOUND

    found = []
    for kind, paths in ((IMAGES, options.image), (VIDEO, options.video), (SOUND, options.sound)):
        for path in paths:
            inside = {each.name: each for each in path.iterdir()} if path.is_dir() else {}
            parts = [inside[name] for name in sorted(inside, key=numerically)] or [path]
            if not all(part.is_file() for part in parts):
                raise UserError(f"{path}: no such file, or an empty folder")
            found.append(Medium(kind, tuple(part.read_bytes() for part in parts)))
    return found


def converted(checkpoint: Path, step: int | None = None) -> Path:
    """Return a Hugging Face directory of a checkpoint; it is kept for the next question."""
    from conversion.torch_dist import Checkpoint
    from conversion.trained import export

    if any((checkpoint / name).is_file() for name in ("config.json", "adapter_config.json")):
        return checkpoint
    saved = Checkpoint(checkpoint / f"iter_{step:07}" if step else checkpoint).directory
    kept = saved.parent.with_name(f"{saved.parent.name}-hugging-face") / saved.name
    written = (saved / ".metadata").stat().st_mtime
    if kept.exists() and kept.stat().st_mtime < written:
        kept.rename(kept.with_name(f"{kept.name}.{kept.stat().st_mtime_ns}"))
    if not kept.exists():
        print(f"converting {saved} to {kept}", file=sys.stderr)
        export(saved, kept)
    return kept


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
