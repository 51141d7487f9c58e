# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run pytest on N ranks of this host, which are forked from a process that has imported all tests.

    python -m tests.ranks N[,N...] [pytest arguments]      e.g. 2,4,8: one world after the other

The tests are collected once for all worlds, before the forks.
"""

import contextlib
import io
import sys

import pytest

from tests.agent import run_ranks

DONE = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


class SameTests:
    """Ends a world that collects other tests than the first collection: rows that a generator
    yields, say, are there only once."""

    def __init__(self) -> None:
        self.found: set[str] | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid for item in items}
        if self.found is not None and found != self.found:
            first = min(found ^ self.found)
            raise pytest.UsageError(f"{first} was not collected each time: give its rows as a list")
        self.found = found


SAME_TESTS = SameTests()


def main(sizes: list[int], arguments: list[str]) -> int:
    """Run each world to its end; returns 0 if all passed."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main([*arguments, "--collect-only"], plugins=[SAME_TESTS])
    if code not in DONE:
        print(said.getvalue())
        return int(code)
    failed = 0
    for size in sizes:
        print(f"\n===== {size} ranks", flush=True)
        failed |= run_ranks(size, _rank, arguments)
    return failed


def _rank(arguments: list[str]) -> None:
    # What libraries write before they abort must not be lost with pytest's captured files.
    code = pytest.main(["--capture=sys", *arguments], plugins=[SAME_TESTS])
    if code not in DONE:
        sys.exit(int(code))


if __name__ == "__main__":
    sys.exit(main([int(size) for size in sys.argv[1].split(",")], sys.argv[2:]))
