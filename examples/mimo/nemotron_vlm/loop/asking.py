# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The command that asks the model just trained about a held-out sample."""

import json
import shlex
import sys
from pathlib import Path

from examples.mimo.nemotron_vlm.data.sample import SampleSource

HERE = Path(__file__).resolve().parents
TOOL = next((path for each in HERE if (path := each / "tools/generate.py").exists()), None)
"""The tool that asks; None in a checkout elsewhere, which has no tools of ours."""


def ask_command(source: SampleSource, number: int, checkpoints: Path) -> str:
    """Write a held-out sample's media into ``checkpoints/asked``; return the command that asks.

    Returns "" if the sample has no question that can be asked alone, or its media cannot be read or
    written: training has ended well then, all the same.
    """
    checkpoints = checkpoints.absolute()  # as the paths beside it on the terminal
    try:
        question = source.question("test", number)
        if question is None:
            return ""
        words = [sys.executable, str(TOOL or "tools/generate.py"), str(checkpoints)]
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
    return shlex.join([*words, "--ask", question.text])
