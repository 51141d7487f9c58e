# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""``--once``: of a test with several rows of parameters, run the first; on several ranks, the most.

So every behaviour is seen once; rows are sorted with that in mind, the most demanding first. A test
that several numbers of ranks repeat has one name in classes that are named for them: TestFourRanks.
"""

import os
import re
from collections.abc import Iterator

import pytest

_RANKS = re.compile(r"::Test(One|Two|Four|Eight)Ranks?\b")


def _ranks(item: pytest.Item) -> int:
    marker = item.get_closest_marker("world_size")
    return marker.args[0] if marker else 1


@pytest.fixture(autouse=True)
def _attention_backend_is_forgotten() -> Iterator[None]:
    """A model notes its backend in the environment, where the next one refuses another."""
    before = set(os.environ)
    yield
    for name in set(os.environ) - before:
        if name.startswith("NVTE_"):
            del os.environ[name]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--once``."""
    parser.addoption("--once", action="store_true", help="of each test, run the first row only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out all rows but one, if asked to."""
    if not config.getoption("once"):
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    largest: dict[str, pytest.Item] = {}
    for name, item in first.items():
        test = _RANKS.sub("", name)
        if test not in largest or _ranks(item) > _ranks(largest[test]):
            largest[test] = item
    kept = set(largest.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
