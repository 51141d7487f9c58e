# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The commands for the model just trained: to ask it, to score its answers, to export it."""

import json
import shlex
import sys
from pathlib import Path

from examples.mimo.nemotron_vlm.data.sample import SampleSource
from examples.mimo.nemotron_vlm.loop.best import FILE as BEST

HERE = Path(__file__).resolve().parents
FOUND = (path.parent for each in HERE if (path := each / "tools/generate.py").exists())
TOOLS = next(FOUND, Path("tools"))
"""Folder of our tools; a checkout elsewhere has none of them."""


def next_commands(source: SampleSource, checkpoints: Path, keeps_best: bool) -> list[str]:
    """Return lines with the commands for a trained model, or for its best checkpoint.

    Args:
        keeps_best: whether the run keeps its best one; if not, the folder's may be another run's.
    """
    checkpoints = checkpoints.absolute()  # as the paths beside it on the terminal
    has_best = keeps_best and (checkpoints / BEST).exists()
    chosen = checkpoints / "best" if has_best else checkpoints
    page, export = (checkpoints.with_name(name) for name in ("evaluation.html", "hugging-face"))
    commands = {
        "ask it": ask_command(source, 0, checkpoints, chosen),
        "evaluate it": _command("evaluate.py", chosen, "--out", page),
        "export it": _command("checkpoint/convert.py", "megatron-to-hf", chosen, "--out", export),
    }
    return [f"{what}: {command}" for what, command in commands.items() if command]


def _command(tool: str, *words: str | Path) -> str:
    return shlex.join(map(str, (sys.executable, TOOLS / tool, *words)))


def ask_command(
    source: SampleSource, number: int, checkpoints: Path, chosen: Path | None = None
) -> str:
    """Write a held-out sample's media into ``checkpoints/asked``; return the command that asks the
    chosen checkpoint, by default the newest.

    Returns "" if the sample has no question that can be asked alone, or its media cannot be read or
    written: training has ended well then, all the same.
    """
    try:
        question = source.question("test", number)
        if question is None:
            return ""
        words = []
        for place, (kind, files) in enumerate(question.media):
            folder = checkpoints / "asked" / f"{number}.{place}"
            folder.mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                (folder / name).write_bytes(data)
            words += [f"--{kind}", str(folder / name if len(files) == 1 else folder)]
    except (OSError, ValueError):
        return ""
    if question.asked != source.asked:
        words += ["--chat-template-kwargs", json.dumps(question.asked)]
    return _command("generate.py", chosen or checkpoints, *words, "--ask", question.text)
