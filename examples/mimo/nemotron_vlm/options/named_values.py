# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options of encoders: ``VALUE`` for all that a model has, or ``NAME:VALUE`` for one of them."""

from __future__ import annotations

from collections.abc import Sequence

from examples.mimo.common.errors import UserError


def by_encoder(option: str, given: Sequence[str] | None, names: Sequence[str]) -> dict[str, str]:
    """Return what an option says for each encoder; of several values for all, the last counts.

    Raises:
        UserError: an encoder is unknown, or given twice.
    """
    common: dict[str, str] = {}
    found: dict[str, str] = {}
    for word in given or ():
        name, colon, value = word.rpartition(":")
        if not colon:
            common = dict.fromkeys(names, value)
        elif name not in names:
            raise UserError(f"{option} {word}: no such encoder; choose from {', '.join(names)}")
        elif name in found:
            raise UserError(f"{option} {word}: {name} is given twice; give each encoder once")
        else:
            found[name] = value
    return common | found
