# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The tests that `--once` keeps."""

from unittest.mock import Mock

from tests.conftest import pytest_collection_modifyitems


def item(nodeid: str, *shows: str) -> Mock:
    marker = Mock(args=shows) if shows else None
    return Mock(nodeid=nodeid, get_closest_marker=lambda name: marker)


def test_the_first_row_of_each_test_in_the_first_of_its_classes():
    first, other = item("a.py::TestRows::test_same[1]"), item("a.py::TestOther::test_same")
    second = item("a.py::TestRows::test_same[2]")
    four, two = item("b.py::TestFourRanks::test_same[1]"), item("b.py::TestTwoRanks::test_same")
    more = item("b.py::TestFourRanks::test_same[2]")
    elsewhere = item("c.py::TestTwoRanks::test_same")
    items = [first, second, other, four, more, two, elsewhere]
    pytest_collection_modifyitems(Mock(), items)
    assert items == [first, other, four, elsewhere]


def test_the_first_row_of_each_mark():
    rows = [item(f"a.py::test_rows[{n}]", shown) for n, shown in enumerate(("x", "y", "x"))]
    items = list(rows)
    pytest_collection_modifyitems(Mock(), items)
    assert items == rows[:2]
