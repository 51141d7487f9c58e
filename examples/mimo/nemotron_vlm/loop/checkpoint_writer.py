# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The process that writes a rank's asynchronous checkpoints."""

from __future__ import annotations

import signal
from argparse import Namespace

from megatron.training import async_utils


def start_checkpoint_writer(args: Namespace) -> object:
    """Start the writer, ignoring the signal that asks ranks to save and exit; Megatron uses it.

    The signal may go to all processes of a job. It would end the writer, and the last save would
    wait for it for ever. A process passes the signals that it ignores on to those that it starts.

    Returns:
        A handle to keep until training ends: NVRx ends the process when it is deleted.
    """
    handler = signal.signal(args.exit_signal, signal.SIG_IGN)
    async_utils.init_persistent_async_worker(args.rank, "forkserver")
    signal.signal(args.exit_signal, handler)
    return async_utils._async_calls_queue
