#!/usr/bin/env python3
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Ask a trained model about images, sounds and clips; transformers generates the answer.

    tools/generate.py CHECKPOINT --image FILE --ask TEXT
    tools/generate.py CHECKPOINT --questions FILE > answers.jsonl

CHECKPOINT is a directory that the program saved to, LoRA runs too, or a Hugging Face directory that
was converted, or one of peft's adapters that names such a directory as its base.
Without --ask, questions are read from the terminal, one a line, in one conversation.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent / name) for name in ("checkpoint", ".")]

from command_line import BATCH, DEVICE, Parser, positive  # noqa: E402
from in_checkout import run  # noqa: E402

KINDS = {"image": "an image", "sound": "a sound", "video": "a clip, or a folder of frames"}
"""Options of media, and their help."""
CONVERT = Path(__file__).resolve().parent / "checkpoint/convert.py"
DRAWS = ("temperature", "top_p", "top_k")


def main(argv: list[str]) -> int:
    """Answer; return the exit status, 2 for user errors."""
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="of the program, or of Hugging Face")
    for name, what in KINDS.items():
        add(f"--{name}", action="append", default=[], type=Path, metavar="FILE", help=what)
    add("--ask", metavar="TEXT", help="the question; <image>, <sound>, <video> place the media")
    what = "file of records as --data takes them, or of a text a line; answers are JSON lines"
    add("--questions", type=Path, metavar="FILE", help=what)
    what = f"questions of a file answered at a time; {BATCH}, or always 1 if tokens are drawn"
    add("--batch", type=positive, default=BATCH, metavar="N", help=what)
    add("--step", type=positive, metavar="N", help="take this step's checkpoint, not the newest")
    what = 'of the chat template, as JSON: {"enable_thinking": false}; else as in training'
    add("--chat-template-kwargs", type=json.loads, metavar="JSON", help=what)
    add("--max-tokens", type=positive, default=256, metavar="N", help="of an answer")
    add("--temperature", type=float, metavar="T", help="draw tokens, by their logits / T")
    add("--top-p", type=float, metavar="P", help="draw from tokens of probability P")
    add("--top-k", type=positive, metavar="K", help="draw from K tokens")
    add("--seed", type=int, default=0, metavar="N", help="of an answer's draws")
    add("--device", choices=("cpu", "cuda"), help=DEVICE)
    options = parser.parse_args(argv)
    return run(lambda: _answer(options), options.device)


def _answer(options: Namespace) -> None:
    from conversion.their_model import Conversation
    from examples.mimo.common.errors import UserError, one_line

    draws = {name: each for name in DRAWS if (each := getattr(options, name)) is not None}
    how = {"max_new_tokens": options.max_tokens, "seed": options.seed}
    how |= {"do_sample": True, "top_k": 0} | draws if draws else {}
    if not (draws.get("temperature", 1) > 0 and 0 < draws.get("top_p", 1) <= 1):
        raise UserError("--temperature must be above 0, and --top-p above 0 and at most 1")
    if not isinstance(options.chat_template_kwargs, dict | None):
        raise UserError("--chat-template-kwargs takes a JSON object")
    try:
        files, stream = _files(options), sys.stdout.isatty()
        # All are read before the model is loaded, and their media again when they are asked.
        asked = [(name, record.turns[-1].text) for name, record in _questions(options, files)]
        directory = converted(options.checkpoint, options.step)
        model = Conversation(directory, options.chat_template_kwargs)
        records = (record for _, record in _questions(options, files))
        answers = model.answers(records, 1 if draws else options.batch, **how)
        for (name, question), answer in zip(asked, answers, strict=True):
            said = {"name": name, "question": question, "answer": answer}
            print(json.dumps(said, ensure_ascii=False), flush=True)
        typed = iter(_next_question, "") if options.ask is None else [options.ask]
        for question in typed if options.questions is None else ():
            answer = model.ask(question, files, stream=stream, **how)
            if not stream:
                print(answer)
            files = []
    except ValueError as error:
        raise UserError(one_line(error)) from error


def _questions(options: Namespace, files: list) -> Iterator[tuple]:
    """Yield the name and the conversation of each question of a file, with its media's content."""
    from conversion.their_model import question_of
    from examples.mimo.common.errors import UserError
    from examples.mimo.nemotron_vlm.data import SUFFIXES
    from examples.mimo.nemotron_vlm.data.reading_options import ReadingOptions
    from examples.mimo.nemotron_vlm.energon.encoding import read_files
    from examples.mimo.nemotron_vlm.energon.files import FileSet
    from examples.mimo.nemotron_vlm.energon.records import ENTRIES

    file = options.questions
    if file is None:
        return
    if options.ask is not None or files and file.suffix in SUFFIXES:
        raise UserError(f"--questions {file}: leave out --ask, and media if the file names its own")
    if file.suffix not in SUFFIXES:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if line.strip():
                yield f"{file.name}:{number}", question_of(line.strip(), files)
        return
    records = FileSet(file, None)
    for index in records.subset:
        try:
            raw = records.raw(index)
            content = json.loads(raw["json"])
            for kind, (role, text) in ENTRIES.items():
                if isinstance(content, dict) and isinstance(content.get(kind), list):
                    content[kind].append({role: "assistant", text: "-"})  # as in training
            raw["json"] = json.dumps(content).encode()
            record = records.record(raw, ReadingOptions.prompt)
        except ValueError as error:
            raise ValueError(f"{file.parent / records.name(index)}: {error}") from error
        turns = record.turns[:-1]
        turns = turns[:-1] if turns[-1].role == "assistant" else turns
        media = read_files(raw, record.media)
        yield records.name(index), record._replace(turns=turns, media=media)


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
    from examples.mimo.common.errors import UserError

    if any((checkpoint / name).is_file() for name in ("config.json", "adapter_config.json")):
        if step:
            raise UserError(f"--step {step}: {checkpoint} is of Hugging Face, and has no steps")
        return checkpoint
    saved = Checkpoint(checkpoint / f"iter_{step:07}" if step else checkpoint).directory
    saved = Path(os.path.abspath(saved))  # the folder that it is in may be the current one
    kept = saved.parent.with_name(f"{saved.parent.name}-hugging-face") / saved.name
    written = (saved / ".metadata").stat().st_mtime
    if kept.exists() and kept.stat().st_mtime < written:
        kept.rename(kept.with_name(f"{kept.name}.{kept.stat().st_mtime_ns}"))
    if not kept.exists():
        print(f"converting {saved} to {kept}", file=sys.stderr)
        command = [sys.executable, CONVERT, "megatron-to-hf", saved, "--out", kept]
        if subprocess.run(command).returncode:  # it sees no GPU, and has said why
            sys.exit(2)
    return kept


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
