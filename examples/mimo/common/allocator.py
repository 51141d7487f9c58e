# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""This module reads what the environment asks of PyTorch's allocator, without importing PyTorch."""

import os

NAMES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""The variable's name, and the older one."""


def has_expandable_segments() -> bool:
    """Return whether GPU memory is to be taken in segments that grow."""
    return any("expandable_segments:True" in os.environ.get(name, "") for name in NAMES)
