# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The line of a run that is asked to end: the saved step, its place, and how to go on."""

import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.mimo.common.errors import NOTED, report

ENDING = signal.SIGINT, signal.SIGTERM

SIGNALLED = 128
"""Exit code of a process that a signal has ended, without the signal's number; as in shells."""


@dataclass
class Standing:
    """A run's place of checkpoints, the way to go on from there, and whether it left as asked."""

    save: str | None = None
    goes_on: str = ""
    has_left: bool = False

    def note(self) -> None:
        """Tell the launcher, if there is one."""
        if (path := os.environ.get(NOTED)) and os.environ.get("LOCAL_RANK") == "0":
            Path(path).write_text(json.dumps(asdict(self)))

    @classmethod
    def noted(cls, path: Path) -> "Standing":
        """Return what a rank has told, if any has."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def __str__(self) -> str:
        try:
            step = int(Path(self.save or "", "latest_checkpointed_iteration.txt").read_text())
        except (OSError, ValueError):  # no file, or that of a converted checkpoint
            return "nothing is saved" + ("" if self.save else ": there is no --save")
        return f"step {step} is saved in {self.save}; {self.goes_on}"


standing = Standing()
"""This rank's."""


def end_quietly(is_alone: bool) -> None:
    """End by signals without a traceback; a process that has no launcher says where it stands."""
    own = os.getpid()

    def end(number: int, _frame: object) -> None:
        if os.getpid() == own:  # not in a loading process
            report(f"ended by {signal.Signals(number).name}: {standing}")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in ENDING:
        signal.signal(number, end if is_alone else signal.SIG_DFL)
