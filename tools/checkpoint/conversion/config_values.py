# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Checks for values of Hugging Face configurations that are fixed in our model."""

from examples.mimo.common.errors import UserError


def check_values(what: str, config: object, expected: dict[str, object]) -> None:
    """Check that fields of a configuration have the only values that our model supports.

    Raises:
        UserError: a field of ``what`` has another value; the message names every such field.
    """
    wrong = [
        f"{name} is {getattr(config, name)}, and ours has {value}"
        for name, value in expected.items()
        if getattr(config, name) != value
    ]
    if wrong:
        raise UserError(f"{what} cannot be expressed:\n  " + "\n  ".join(wrong))
