# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options of encoders, which are given as ``VALUE``, or as ``NAME:VALUE`` for one of several."""

from __future__ import annotations

from collections.abc import Sequence

from examples.mimo.common.errors import UserError


def by_encoder(option: str, given: Sequence[str] | None, names: Sequence[str]) -> dict[str, str]:
    """Return what was given for each encoder; "" is the name for a value without one.

    Of several values without a name, the last one counts.

    Raises:
        UserError: an encoder is unknown or repeated.
    """
    found: dict[str, str] = {}
    for word in given or ():
        name, colon, value = word.rpartition(":")
        if colon and name not in names:
            raise UserError(f"{option} {word}: no such encoder; choose from {', '.join(names)}")
        if colon and name in found:
            raise UserError(f"{option} {word}: {name} is given twice; give each encoder once")
        found[name] = value
    return found


def of_each_encoder(
    option: str, given: Sequence[str] | None, names: Sequence[str], default: str
) -> list[str]:
    """Return the value of each encoder, where a name may be left out for an only one.

    Raises:
        UserError: an encoder is unknown, repeated or, if any is given, missing.
    """
    found = by_encoder(option, given, names)
    if len(names) == 1:
        return [found.get(names[0], found.get("", default))]
    if "" in found:
        raise UserError(
            f"{option} {found['']}: the model has encoders {', '.join(names)}; give {option} "
            f"NAME:{found['']}, once for each"
        )
    missing = [name for name in names if name not in found]
    if found and missing:
        raise UserError(f"{option}: {missing[0]} is missing; add {option} {missing[0]}:…")
    return [found.get(name, default) for name in names]
