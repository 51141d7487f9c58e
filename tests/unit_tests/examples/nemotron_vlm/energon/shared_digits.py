# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Digits in shards for all ranks of a test."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import make_digits, survey
from tests.unit_tests.test_utilities import Utils


@contextlib.contextmanager
def shared_digits(samples: int) -> Iterator[Path]:
    """Make and survey a data set on the first rank, for all ranks."""
    with Utils.shared_directory() as directory:
        made = directory / "digits"
        with Utils.first_rank_first() as first:
            if first:
                make_digits(made, samples, seed=2)
                survey(made)
        yield made
