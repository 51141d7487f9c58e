# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Check whether layers may fall back on the reference ops."""

import functools
import importlib.util
import logging

from megatron.core.utils import log_single_rank

logger = logging.getLogger(__name__)


@functools.cache
def stand_in_for(package: str, layers: str) -> None:
    """Warn once that ``layers`` run on the reference ops because ``package`` is not installed.

    Raises:
        ImportError: ``package`` is installed, but its kernels cannot be imported.
    """
    if importlib.util.find_spec(package) is not None:
        raise ImportError(
            f"{package} is installed, but its kernels cannot be imported: repair it, or uninstall "
            "it to train on the reference ops"
        )
    log_single_rank(
        logger,
        logging.WARNING,
        f"{package} is not installed: {layers} run on the PyTorch reference ops, which are as "
        "exact, but slow on a GPU",
    )
