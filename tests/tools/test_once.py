# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""What `--once` leaves of the tests."""

from unittest.mock import Mock

from tests.conftest import pytest_collection_modifyitems


def item(nodeid: str, ranks: int | None = None) -> Mock:
    marker = ranks and Mock(args=(ranks,))
    return Mock(nodeid=nodeid, get_closest_marker=lambda name: marker)


def test_the_first_row_of_each_test_on_the_most_ranks():
    first, other = item("a.py::TestRows::test_same[1]"), item("a.py::TestOther::test_same", 2)
    second = item("a.py::TestRows::test_same[2]")
    two, one = item("b.py::TestTwoRanks::test_same", 2), item("b.py::TestOneRank::test_same")
    eight, more = (item(f"b.py::TestEightRanks::test_same[{row}]", 8) for row in "12")
    elsewhere = item("c.py::TestTwoRanks::test_same", 2)
    items = [first, second, other, one, two, eight, more, elsewhere]
    pytest_collection_modifyitems(Mock(), items)
    assert items == [first, other, eight, elsewhere]
