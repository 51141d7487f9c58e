# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Write a small file as a whole, or leave the old one as it is."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def whole_file(path: str, open_file: Callable) -> Iterator[TextIO]:
    """Open a file to write its new content, which takes the place of the old one as a whole."""
    written = path if "://" in path else f"{path}.partial"  # object stores show whole files only
    with open_file(written, "w") as file:
        yield file
    if written != path:
        os.replace(written, path)
