# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a run reports: one JSON line a step, TensorBoard, and its progress; by one rank."""

from __future__ import annotations

import json
import time
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SHOWN = ("loss", "eval_accuracy")
"""In the progress bar."""

LINE_INTERVAL_S = 10
"""Where there is no terminal, progress is a line so often, and after the last step."""


class MetricsWriter:
    """Writes records as they come.

    Args:
        path: of the JSON lines; a resumed run appends to what the steps before it wrote. None:
            the progress only, a bar on a terminal, else lines.
        first_step: steps from this one on are dropped from an existing file: they are run again.
        total_steps: of the whole run.
    """

    def __init__(self, path: Path | None, first_step: int, total_steps: int) -> None:
        self._file = self._board = None
        if path:
            self._file = _reopen(path, first_step)
            self._board = SummaryWriter(path.parent / "tensorboard", purge_step=first_step)
        self._bar = tqdm(
            total=total_steps, initial=first_step, disable=None, unit="step", mininterval=1.0
        )
        self._total_steps, self._last_line = total_steps, time.monotonic()

    def write(self, record: dict[str, float | int | bool | None]) -> None:
        """Append one step's record; `step` counts from 1, and is in every record.

        None stands for a number that is not finite.
        """
        if self._file:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            for name, value in record.items():
                if name != "step" and value is not None:
                    self._board.add_scalar(name, value, record["step"])
        shown = {k: f"{record[k]:.3g}" for k in SHOWN if record.get(k) is not None}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()
        if self._bar.disable:
            self._print_line(record["step"], shown)

    def _print_line(self, step: int, shown: dict[str, str]) -> None:
        now = time.monotonic()
        if step == self._total_steps or now - self._last_line >= LINE_INTERVAL_S:
            self._last_line = now
            numbers = ", ".join(f"{name} {number}" for name, number in shown.items())
            print(f"step {step} of {self._total_steps}: {numbers}", flush=True)

    def close(self) -> None:
        """Finish the files and the bar."""
        self._bar.close()
        if self._file:
            self._file.close()
            self._board.close()


def read_metrics(path: Path) -> list[dict]:
    """All whole records of a file; a last line that a kill cut short is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _reopen(path: Path, first_step: int):
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    if first_step and path.exists():
        kept = [record for record in read_metrics(path) if record["step"] <= first_step]
    partial = path.with_name(path.name + ".partial")
    file = partial.open("w")
    file.writelines(json.dumps(record) + "\n" for record in kept)
    file.flush()
    partial.replace(path)
    return file
