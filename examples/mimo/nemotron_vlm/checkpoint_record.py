# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints a directory has, which run each belongs to, and where to save.

A checkpoint is written as ``step_00000200.partial`` and renamed once it is whole, so a save that
was cut short is never the newest. ``run.json`` says which run it belongs to and where it stood.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.mimo.nemotron_vlm.cli import RunConfig
from examples.mimo.nemotron_vlm.errors import UserError

FORMAT = 1
WHOLE = re.compile(r"step_(\d{8})")

OPTIONS = {"model": "--model", "seed": "--seed", "data": "--data", "frozen": "--freeze"}
"""Facts of a record that a run which resumes must share, and what sets them."""


@dataclass(frozen=True)
class Record:
    """``run.json``.

    step: optimizer steps taken, skipped ones included; with the seed it is the data's position.
    samples: of training data that were read; for people.
    skipped: steps that were skipped.
    model, seed, data, frozen: what a run that goes on must share.
    layout: of the modules that wrote it.
    """

    step: int
    samples: int
    skipped: int
    model: str
    seed: int
    data: str
    frozen: tuple[str, ...]
    layout: str
    format: int = FORMAT

    @classmethod
    def of(cls, config: RunConfig, step: int, skipped: int) -> Record:
        """What a checkpoint of this run says."""
        return cls(
            step=step,
            samples=step * config.layouts.batch.global_size,
            skipped=skipped,
            model=config.preset.name,
            seed=config.seed,
            data=config.data,
            frozen=tuple(sorted(config.freeze)),
            layout=layout_signature(config),
        )

    @classmethod
    def read(cls, checkpoint: Path) -> Record:
        """Read it.

        Raises:
            UserError: it cannot be read, or is no such record.
        """
        try:
            fields = json.loads((checkpoint / "run.json").read_text())
            if fields.get("format") != FORMAT:
                raise UserError(
                    f"--load {checkpoint} is of format {fields.get('format')}, this program reads "
                    f"format {FORMAT}: load it with the version that wrote it"
                )
            return cls(**fields | {"frozen": tuple(fields["frozen"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(checkpoint, error) from error

    def write(self, checkpoint: Path) -> None:
        """Write it, onto the disk."""
        with (checkpoint / "run.json").open("w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())

    def check_same_run(self, config: RunConfig, checkpoint: Path) -> None:
        """Refuse a foreign checkpoint.

        Raises:
            UserError: it is of another model, seed or data, or has other parts frozen.
        """
        own = Record.of(config, self.step, self.skipped)
        for name, option in OPTIONS.items():
            if getattr(self, name) != getattr(own, name):
                raise UserError(
                    f"--load {checkpoint} is of a run with {option} {_shown(self, name)}, this one "
                    f"has {_shown(own, name)}"
                )


def _shown(record: Record, name: str) -> str:
    value = getattr(record, name)
    return (",".join(value) or "nothing") if isinstance(value, tuple) else str(value)


def damaged(checkpoint: Path, error: Exception) -> UserError:
    """What to say of a checkpoint that cannot be loaded."""
    reason = " ".join(str(error).split())
    return UserError(
        f"--load {checkpoint} is damaged: {reason}; remove it to go on from the one before"
    )


def layout_signature(config: RunConfig) -> str:
    """Layouts and device in one line; ranks of equal signatures hold the same parts."""
    layouts = config.layouts
    return (
        f"{layouts.placement}: encoder {layouts.encoder}, language {layouts.language}, "
        f"{config.device}"
    )


def newest(directory: Path) -> Path | None:
    """The whole checkpoint of the highest step under ``directory``."""
    if not directory.is_dir():
        return None
    named = (path for path in directory.iterdir() if WHOLE.fullmatch(path.name))
    whole = [path for path in named if (path / "run.json").exists()]
    return max(whole, default=None)


def check_save_directory(directory: Path, load: Path | None) -> None:
    """Refuse a directory that cannot be written, or that holds another run's checkpoints.

    Raises:
        UserError: naming the fact and the fix.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--save {directory}: cannot write there ({error.strerror})") from error
    found = newest(directory)
    if found and (load is None or load.resolve() != directory.resolve()):
        raise UserError(
            f"--save {directory} already holds {found.name}: "
            f"go on from it with --load {directory}, or choose another directory"
        )
