# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What `--once` leaves of the tests."""

from types import SimpleNamespace
from unittest.mock import Mock

from tests.conftest import pytest_collection_modifyitems


def item(nodeid: str, ranks: int | None = None) -> SimpleNamespace:
    marker = ranks and SimpleNamespace(args=(ranks,))
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda _: marker)


def test_the_first_row_of_each_test_on_the_most_ranks():
    kept = [item("b.py::TestTwoRows::test_same[1]"), item("b.py::TestOther::test_same", 2)]
    kept += [item("c.py::TestEightRanks::test_same[5]", 8), item("d.py::TestTwoRanks::test_same", 2)]
    left = [item("b.py::TestTwoRows::test_same[2]"), item("c.py::TestEightRanks::test_same[1]", 8)]
    left += [item("c.py::TestOneRank::test_same"), item("c.py::TestTwoRanks::test_same", 2)]
    items = [*left[2:], *kept, *left[:2]]
    pytest_collection_modifyitems(Mock(getoption=lambda name: True), items)
    assert items == kept
