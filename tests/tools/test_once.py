# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The tests that `--once` keeps."""

from unittest.mock import Mock

from tests.conftest import pytest_collection_modifyitems


def item(nodeid: str, *shows: str) -> Mock:
    marker = Mock(args=shows) if shows else None
    return Mock(nodeid=nodeid, get_closest_marker=lambda name: marker)


def test_the_first_row_of_each_test_and_of_each_mark_in_the_first_of_its_classes():
    names = ["a.py::TestRows::test_same[1]", "a.py::TestRows::test_same[2]", "a.py::TestOther::t"]
    names += ["b.py::TestFourRanks::test_same[1]", "b.py::TestTwoRanks::test_same"]
    items = [item(name) for name in [*names, "c.py::TestTwoRanks::test_same"]]
    items += [item(f"d.py::test_rows[{n}]", shown) for n, shown in enumerate("xyx")]
    kept = [items[n] for n in (0, 2, 3, 5, 6, 7)]
    pytest_collection_modifyitems(Mock(), items)
    assert items == kept
