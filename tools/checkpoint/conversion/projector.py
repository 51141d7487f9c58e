# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The projector: RMSNorm and two linear layers, the first, second and last of ``mlp1``."""

from __future__ import annotations

from conversion.rows import Rows, Table

PREFIX = "modality_submodules.images.input_projections.0."
"""Of our names."""

THEIRS = "mlp1."
"""Of theirs."""

INNER = "1.weight"
"""The first linear layer, [inner width, features]."""


def projector_table() -> Table:
    """The projector's tensors, without the two prefixes."""
    return {
        "norm.weight": (Rows("0.weight"),),
        "mlp.encoder.linear_fc1.weight": (Rows(INNER),),
        "mlp.encoder.linear_fc2.weight": (Rows("3.weight"),),
    }
