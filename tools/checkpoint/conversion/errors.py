# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What a user got wrong."""


class ConversionError(Exception):
    """The files, the configuration or the checkpoint do not fit; its text names what and why."""


def check_values(what: str, config: object, expected: dict[str, object]) -> None:
    """Hold fields of a configuration to the only values that our model can have.

    Raises:
        ConversionError: names every field of ``what`` that has another.
    """
    wrong = [
        f"{name} is {getattr(config, name)}, and ours has {value}"
        for name, value in expected.items()
        if getattr(config, name) != value
    ]
    if wrong:
        raise ConversionError(f"{what} cannot be expressed:\n  " + "\n  ".join(wrong))
