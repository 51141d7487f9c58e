# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Writes of the first rank alone, at the end of a save: they fail on all ranks, or on none."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from megatron.core.dist_checkpointing.core import CheckpointingException

RAISED = Exception, CheckpointException, SystemExit  # PyTorch's is no `Exception`
"""Errors that a function may raise. An interrupt is not caught, because it reaches all ranks."""


def on_first_rank(function: Callable) -> Callable:
    """Make a function run on rank 0 of the world, and return its result on all; collective.

    Whatever the function raises is a CheckpointingException on all ranks.
    """

    @functools.wraps(function)
    def called(*arguments):
        if not dist.is_initialized():
            return function(*arguments)
        found = [None, None]
        if dist.get_rank() == 0:
            try:
                found[0] = function(*arguments)
            except RAISED as error:
                found[1] = described(error)
        dist.broadcast_object_list(found)
        result, error = found
        if error is not None:
            raise CheckpointingException(error)
        return result

    return called


def described(error: BaseException) -> str:
    """Return the text of an error; with its class, unless the system has written the text."""
    of_user = isinstance(error, OSError | CheckpointingException)
    return str(error) if of_user else f"{type(error).__name__}: {error}"


def failures(function: Callable, *arguments) -> dict[int, tuple]:
    """Call a function on the coordinator; return its error as PyTorch gathers failures."""
    try:
        function(*arguments)
    except RAISED as error:
        return {0: _wrap_exception(error)}
    return {}


@contextmanager
def whole_file(path: str, open_file: Callable) -> Iterator[TextIO]:
    """Open a file to write its new content, which takes the place of the old one as a whole."""
    written = path if "://" in path else f"{path}.partial"  # object stores show whole files only
    with open_file(written, "w") as file:
        yield file
    if written != path:
        os.replace(written, path)
