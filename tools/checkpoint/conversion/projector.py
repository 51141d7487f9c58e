# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Translation of the projector: RMSNorm and two linear layers, modules 0, 1 and 3 of ``mlp1``."""

from __future__ import annotations

from conversion.rows import Rows, Table

PREFIX = "modality_submodules.images.input_projections.0."
"""Prefix of our names."""

THEIRS = "mlp1."
"""Prefix of theirs."""

INNER = "1.weight"
"""The first linear layer, [inner width, features]."""


def projector_table() -> Table:
    """Return the table of the projector's tensors, without the two prefixes."""
    return {
        "norm.weight": (Rows("0.weight"),),
        "mlp.encoder.linear_fc1.weight": (Rows(INNER),),
        "mlp.encoder.linear_fc2.weight": (Rows("3.weight"),),
    }
