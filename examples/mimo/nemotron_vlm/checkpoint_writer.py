# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The process of a rank that writes its asynchronous saves."""

from __future__ import annotations

import signal
from argparse import Namespace

from megatron.training import async_utils


def start_checkpoint_writer(args: Namespace) -> object:
    """Start it deaf to the signal that asks ranks to save and leave; Megatron finds it started.

    Such a signal may go to all processes of a job. It would end this one, and the last save would
    wait for it for ever. What a process ignores, those that it starts ignore too.

    Returns:
        What must live as long as the training: where it is deleted, NVRx ends the process.
    """
    handler = signal.signal(args.exit_signal, signal.SIG_IGN)
    async_utils.init_persistent_async_worker(args.rank, "forkserver")
    signal.signal(args.exit_signal, handler)
    return async_utils._async_calls_queue
