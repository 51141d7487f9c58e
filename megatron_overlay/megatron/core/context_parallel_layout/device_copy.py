# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Copies of plans to a device, for which the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def copied_to(device: torch.device | str, tensor: Tensor) -> Tensor:
    """A host tensor on ``device``; the host goes on at once.

    From memory that is not pinned, CUDA copies 64 KiB or more only after all that the stream has
    to do, and the host waits for that.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
