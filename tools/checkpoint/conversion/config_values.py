# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Values of Hugging Face's configurations that our model cannot change."""

from examples.mimo.nemotron_vlm.errors import UserError


def check_values(what: str, config: object, expected: dict[str, object]) -> None:
    """Hold fields of a configuration to the only values that our model can have.

    Raises:
        UserError: names every field of ``what`` that has another.
    """
    wrong = [
        f"{name} is {getattr(config, name)}, and ours has {value}"
        for name, value in expected.items()
        if getattr(config, name) != value
    ]
    if wrong:
        raise UserError(f"{what} cannot be expressed:\n  " + "\n  ".join(wrong))
