# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""``--once``: of a test with several rows of parameters, run the first.

So every behaviour is seen once; rows are sorted with that in mind, the most demanding first.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--once``."""
    parser.addoption("--once", action="store_true", help="of each test, run the first row only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out all rows but the first, if asked to."""
    if not config.getoption("once"):
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
