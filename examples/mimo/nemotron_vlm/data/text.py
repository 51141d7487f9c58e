# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The tokens of one sample."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Text(NamedTuple):
    """Tokens of a sample, without padding unless a `Reader` has added it.

    input_ids: [n] int64, with as many image tokens as the sample's tiles become embeddings.
    labels: [n] int64, the next token at each position.
    loss_mask: [n] float32, 1 where the label is part of an answer.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
