#!/usr/bin/env python3
# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Ask a trained model about images, sounds and clips; transformers generates the answer.

    tools/generate.py CHECKPOINT --image FILE --ask TEXT

CHECKPOINT is a directory that the program saved to, or a Hugging Face directory that was converted.
Without --ask, questions are read from the terminal, one a line, in one conversation.
"""

from __future__ import annotations

import argparse
import json
import re
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
    add("--max-tokens", type=positive, default=256, metavar="N", help="of an answer")
    return parser


def _answer(options: Namespace) -> None:
    from examples.mimo.common.errors import UserError
    from examples.mimo.nemotron_vlm.energon.errors import BadConversation, BadMedium

    try:
        files = _files(options)
        model = Model(_converted(options.checkpoint, options.step))
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
    from examples.mimo.nemotron_vlm.data.sample import IMAGES, SOUND
    from examples.mimo.nemotron_vlm.energon.conversation import VIDEO
    from examples.mimo.nemotron_vlm.energon.encoding import File

    found = []
    for kind, paths in ((IMAGES, options.image), (VIDEO, options.video), (SOUND, options.sound)):
        for path in paths:
            parts = sorted(path.iterdir(), key=_number) if path.is_dir() else [path]
            if not parts or not all(part.is_file() for part in parts):
                raise UserError(f"{path}: no such file, or an empty folder")
            found.append(File(kind, tuple(part.read_bytes() for part in parts)))
    return found


def _number(path: Path) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", path.name)]


def _converted(checkpoint: Path, step: int | None) -> Path:
    """Return a Hugging Face directory of a checkpoint; it is kept for the next question."""
    from conversion.torch_dist import Checkpoint
    from conversion.trained import export

    if (checkpoint / "config.json").is_file():
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


class Model:
    """A model of transformers with its conversation.

    Args:
        directory: a Hugging Face directory with a tokenizer; and, if the program trained the model,
            with the model's sizes and how inputs were prepared.

    Raises:
        UserError: it lacks a tokenizer, or tensors.
    """

    def __init__(self, directory: Path) -> None:
        from conversion.directions import MODEL
        from conversion.sources import preset_of, sources_of
        from conversion.their_model import their_model
        from conversion.trained import INPUTS
        from examples.mimo.common.errors import UserError
        from examples.mimo.nemotron_vlm.data import make_encoder
        from examples.mimo.nemotron_vlm.model.presets import find_preset, nano_omni_30b_a3b

        inputs = {"prompt": "", "image_token": "<image>", "dynamic_resolution": True}
        inputs |= {"video_frames": None, "video_fps": None, "tokenizer_model": str(directory)}
        if (directory / INPUTS).is_file():
            inputs |= json.loads((directory / INPUTS).read_text())
            preset = find_preset(str(directory / MODEL))
        else:
            base = nano_omni_30b_a3b()
            preset = preset_of(sources_of(directory, base), base, None)
        if inputs["dynamic_resolution"]:
            preset = preset.with_images_of_any_size(None, None)
        try:
            self._encoder = make_encoder(Namespace(**inputs), preset)
        except ValueError as error:
            raise UserError(str(error)) from error
        self._model = their_model(directory)
        self._preset, self._turns, self._files = preset, [], []

    def ask(self, question: str, files: list, max_tokens: int) -> str:
        """Return the answer to a question with media, after those asked before."""
        import torch

        from examples.mimo.nemotron_vlm.energon.conversation import PLACEHOLDERS, Turn, place_media

        counts = {kind: sum(file.kind == kind for file in files) for kind in PLACEHOLDERS}
        turns = [Turn("user", question, True), Turn("assistant", "-")]
        placed, kinds = place_media(turns, counts)
        rest = {kind: [file for file in files if file.kind == kind] for kind in PLACEHOLDERS}
        self._files += [rest[kind].pop(0) for kind in kinds]
        self._turns.append(placed[0])
        ids = torch.from_numpy(self._encoder.question(self._turns, self._files))[None]
        with torch.no_grad():
            embedded = self._embedded(ids)
            made = self._model.generate(
                inputs_embeds=embedded,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=self._encoder.chat.end,
                pad_token_id=self._encoder.chat.pad_token,
            )
        answer = self._encoder.chat.words(made[0].tolist()).strip()
        self._turns.append(Turn("assistant", answer))
        return answer

    def _embedded(self, ids):
        """Return embeddings of tokens [1, n, hidden], with the rows of media in their places."""
        import torch
        from einops import rearrange

        from conversion.their_model import embedded, their_rows
        from examples.mimo.nemotron_vlm.data.sample import IMAGES, SOUND
        from examples.mimo.nemotron_vlm.energon.conversation import KINDS_OF

        images, tokens = self._preset.images, self._encoder.chat.ids
        rows = {token: [] for token in tokens.values()}
        for file in self._files:
            encoder = SOUND if file.kind in KINDS_OF[SOUND] else IMAGES
            made = self._encoder.inputs([file], encoder)
            if isinstance(made, torch.Tensor):  # tiles, each of which is an image
                cut = "n c (h y) (w x) -> n h w (c y x)"
                made = rearrange(made, cut, y=images.patch, x=images.patch)
            rows[tokens[encoder]] += [their_rows(self._model, images, each) for each in made]
        return embedded(self._model, ids, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
