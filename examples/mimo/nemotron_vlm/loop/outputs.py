# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A run's outputs: its log, the folder of its configuration, a check that all can be written."""

import contextlib
import io
import logging
import os
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from errno import EISDIR
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import option_of

PACKAGES = {"wandb_project": "wandb", "tensorboard_dir": "tensorboard"}
PACKAGES |= dict.fromkeys(
    ("enable_ft_package", "fault_injector_ranks", "fault_injector_num_ranks"),
    "nvidia_resiliency_ext",
)
"""Packages that options need. Without one Megatron ends late, or writes nothing."""


class Log(io.TextIOWrapper):
    """A log to which lines are appended; what a full disk does not take is lost."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.open("ab"), line_buffering=True)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def log_file(args: Namespace) -> Path | None:
    """Return the file of this run's output, which all ranks share; collective."""
    if args.log_file or not args.metrics_out:
        return Path(args.log_file) if args.log_file not in (None, "-") else None
    begun = [time.strftime("%Y-%m-%d-%H%M%S")]
    dist.broadcast_object_list(begun)
    return args.metrics_out.with_name(f"log-{begun[0]}.txt")


@contextmanager
def output_to(file: TextIO) -> Iterator[TextIO]:
    """Append what Megatron prints, logs and warns of to a file, and the traceback of an error."""
    with redirect_stdout(file):
        rank = os.environ.get("RANK", "0")  # all ranks and their loading processes have one file
        form = f"%(levelname)s:rank {rank}:%(name)s:%(message)s"
        logging.basicConfig(stream=file, force=True, format=form)
        logging.captureWarnings(True)
        try:
            yield file
        except Exception:
            if file is not sys.__stdout__:
                traceback.print_exc(file=file)
            raise
        finally:
            logging.captureWarnings(False)
            logging.basicConfig(force=True)


def config_folder(args: Namespace) -> Path | None:
    """Return the folder of the run's configuration: the metrics', or the checkpoints'."""
    return args.metrics_out.parent if args.metrics_out else args.save and Path(args.save)


def check_outputs(args: Namespace) -> None:
    """Try to write where the options say, and look for the packages that write.

    Raises:
        UserError: a file or folder cannot be written, or a package is missing, on every rank.
    """
    for name, package in PACKAGES.items():
        is_there = package in sys.modules or find_spec(package)
        if getattr(args, name) and not is_there:
            raise UserError(
                f"{option_of(name)}: {package} is not installed; pip install {package}, or leave "
                "that option out"
            )
    log = None if args.log_file == "-" else args.log_file
    files = {"--metrics-out": args.metrics_out, "--report": args.report, "--log-file": log}
    folders = {"--save": args.save, "--tensorboard-dir": args.tensorboard_dir}
    for option, path in (files | folders).items():
        try:
            if path:
                folder = Path(path) if option in folders else Path(path).parent
                folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
                if option in files and Path(path).is_dir():
                    raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        except OSError as error:
            text = f"{option} {path}: cannot write there ({error.strerror})"
            raise UserError(text) from error
