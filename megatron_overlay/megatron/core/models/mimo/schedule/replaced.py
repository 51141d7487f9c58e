# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Temporary replacement of attributes."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replaced(owner: object, **values: object) -> Iterator[None]:
    """Give attributes of a module or an object these values inside the block."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
