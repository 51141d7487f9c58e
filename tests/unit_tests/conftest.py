# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Pytest on N ranks at once: one report, one outcome, no hang.

Rank 0 prints pytest's report, the others print their failures only. After each test the ranks tell
each other how it went, so that a failure on one is a failure of the run, and no rank enters the
next test's collectives alone.
"""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.unit_tests.test_utilities import (
    COLLECTIVE_TIMEOUT,
    Utils,
    no_global_parallel_state,
)

TESTS_A_COLLECTION = 10
"""Tests between two collections of garbage. The garbage holds groups, and a thread of each gloo
group wakes up a hundred times a second: hundreds of groups take all the time that there is."""

LIMIT_S = 900
"""Seconds that a test may take. A collective has a limit of its own, which names its ranks."""

_stderr = sys.__stderr__
"""The stream for reports of hangs, taken before a test: pytest captures stderr during one."""


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the markers; on several ranks, keep all but rank 0 quiet and agree on outcomes."""
    config.addinivalue_line("markers", "world_size(n): runs on exactly n ranks")
    config.addinivalue_line("markers", "shows(what): with --once, the first row of each runs")
    global _stderr
    _stderr = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")
    faulthandler.register(signal.SIGUSR1, file=_stderr)
    Utils.read_environment()
    if Utils.world_size > 1:
        config.pluginmanager.register(RankAgreement(), "rank-agreement")
        if Utils.rank > 0:
            config.pluginmanager.unregister(name="terminalreporter")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On one rank, skip tests of several visibly; on several, drop those of another number."""
    sizes = {item: item.get_closest_marker("world_size") for item in items}
    sizes = {item: marker and marker.args[0] for item, marker in sizes.items()}
    if Utils.world_size > 1:
        items[:] = [item for item, size in sizes.items() if size == Utils.world_size]
        config.hook.pytest_deselected(items=[item for item in sizes if item not in items])
    for item in items:
        if sizes[item] not in (None, Utils.world_size):
            item.add_marker(pytest.mark.skip(reason=f"needs {sizes[item]} ranks, this run has 1"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt imported objects from garbage collection: a test's models are freed quickly then.

    What a step makes is counted in ten thousands; looking for cycles every 700 takes a twentieth.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_unconfigure() -> None:
    """Let the interpreter's end free all objects: Triton's bindings report any left as leaks."""
    gc.unfreeze()


@pytest.fixture
def shared_path() -> Iterator[Path]:
    """A directory that all ranks know of."""
    with Utils.shared_directory() as path:
        yield path


@pytest.fixture
def group(cp_size: int) -> Iterator[dist.ProcessGroup | None]:
    """A group of the first ``cp_size`` ranks; None on the others, which take no part."""
    Utils.initialize_distributed()
    with Utils.group_of_first_ranks(cp_size) as group:
        yield group


@pytest.fixture(autouse=True)
def _guard_global_parallel_state() -> Iterator[None]:
    with no_global_parallel_state():
        yield


@pytest.fixture(autouse=True)
def _environment_restored() -> Iterator[None]:
    """Restore the environment, into which models write their choice of attention kernels."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _aux_loss_scale_forgotten() -> Iterator[None]:
    """Forget the scale: the first backward with experts fixes its shape, [] outside of a schedule,
    else [1]."""
    yield
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item):
    """End the process, with its stacks, when a test takes too long."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=_stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end(reason: str) -> None:
    print(f"[rank {Utils.rank}] {reason}", file=_stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True, file=_stderr)
    os._exit(70)


def _dump_stacks(ranks: list[int]) -> None:
    """Make ranks of this host write the stacks of all their threads, whatever they wait for."""
    launcher = os.getppid()
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for rank in ranks:  # the order of ranks is that in which the launcher has started them
        with contextlib.suppress(IndexError, ProcessLookupError):
            os.kill(int(children[rank]), signal.SIGUSR1)
    time.sleep(1)


class RankAgreement:
    """The plugin through which ranks exchange outcomes, over the store that torchrun serves."""

    def __init__(self) -> None:
        self._store = dist.PrefixStore("pytest", Utils.store())
        self._failed: list[str] = []
        self._tests = 0
        self._any_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._note_failure(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note_failure(report)

    def _note_failure(self, report) -> None:
        self._failed.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Wait for all ranks; where one has failed, all make new process groups."""
        failed = self._ranks_failing(nodeid)
        if self._tests % TESTS_A_COLLECTION == 0:
            gc.collect()
        if failed:
            self._any_failed = True
            if Utils.rank == 0:
                print(f"\n[rank 0] {nodeid} failed on ranks {failed}", file=sys.__stderr__)
            Utils.destroy()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail on every rank when a test failed on any."""
        self._any_failed |= bool(self._ranks_failing("the end of the session"))
        if self._any_failed and session.exitstatus in (pytest.ExitCode.OK, 0):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _ranks_failing(self, where: str) -> list[int]:
        """The ranks that noted a failure since the last call, the same list on every rank."""
        keys = [f"{self._tests}/{rank}" for rank in range(Utils.world_size)]
        self._store.set(keys[Utils.rank], "failed" if self._failed else "passed")
        self._tests += 1
        self._failed.clear()
        try:
            self._store.wait(keys, COLLECTIVE_TIMEOUT + timedelta(seconds=5))
        except dist.DistStoreError:
            late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            _dump_stacks(late)
            _end(f"ranks {late} did not reach the end of {where}")
        return [rank for rank, key in enumerate(keys) if self._store.get(key) == b"failed"]
