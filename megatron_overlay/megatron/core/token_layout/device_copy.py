# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Copy plans to a device without making the host wait."""

from __future__ import annotations

import torch
from torch import Tensor


def copied_to(device: torch.device | str, tensor: Tensor) -> Tensor:
    """Copy a host tensor to ``device`` without making the host wait.

    The copy is made from pinned memory: CUDA copies 64 KiB or more of unpinned memory only after
    all earlier work of the stream, for which the host would wait.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
