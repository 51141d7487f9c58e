# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""``--once``: of a test with several rows of parameters, run the first.

So every behaviour is seen once; rows are sorted with that in mind, the most demanding first. A test
that several numbers of ranks repeat has one name in classes that are named for them, TestFourRanks:
the first of these runs.
"""

import os
import re
from collections.abc import Iterator

import pytest

_RANKS = re.compile(r"::Test(One|Two|Four|Eight)Ranks?\b")


# Else PyTorch compiles Megatron's small functions, for each shape of a test.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


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
        first.setdefault(_RANKS.sub("", item.nodeid.partition("[")[0]), item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
