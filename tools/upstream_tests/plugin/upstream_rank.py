# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Pytest plugin for one CPU rank that runs upstream's own tests (`-p upstream_rank`).

It provides what upstream's code expects (CUDA, NCCL and Python 3.12, through the CPU runtime and
`typing_extensions`), writes the outcome of each test as a JSON line, and keeps the ranks together:
all start a test at once, and one that hangs ends all of them.
"""

import ctypes
import faulthandler
import functools
import gc
import json
import os
import re
import sys
import threading
import time
import typing
from datetime import timedelta
from pathlib import Path

import pytest
import stand_ins
import torch.distributed as dist

_RANK, _WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
_RECORD = Path(os.environ["UPSTREAM_TESTS_RECORDS"], f"rank{_RANK}.jsonl")
_DONE = Path(os.environ["UPSTREAM_TESTS_RECORDS"], "done")
_TEST_LIMIT_S = float(os.environ["UPSTREAM_TESTS_TEST_LIMIT_S"])
_COLLECTIVE_LIMIT = timedelta(seconds=float(os.environ["UPSTREAM_TESTS_COLLECTIVE_LIMIT_S"]))
_LONG_TEST_S = 0.5
_BROKEN_GROUPS = re.compile("gloo|Connection|Timed out|process group", re.IGNORECASE)

stand_ins.install()


class Ranks:
    """The ranks of this world: the store through which they meet, and their process groups."""

    def __init__(self) -> None:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Upstream's tests join this store too, as they join torchrun's.
        self._store = dist.TCPStore(*address, None, _RANK == 0, timedelta(seconds=300), False)
        self._meetings = self._initialisations = 0
        self._init_process_group = dist.init_process_group
        dist.distributed_c10d.default_pg_timeout = _COLLECTIVE_LIMIT
        self._replace("init_process_group", self._init)
        self._replace("new_group", self._new_group(dist.new_group))

    @staticmethod
    def _replace(name: str, function: typing.Callable) -> None:
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, function)

    def _init(self, backend=None, init_method=None, timeout=None, **kwargs) -> None:
        # Each time a new prefix: otherwise gloo would find the addresses of earlier groups.
        self._initialisations += 1
        prefix = f"groups/{self._meetings}/{self._initialisations}"
        given = kwargs.pop("store", None)
        kwargs["store"] = dist.PrefixStore(prefix, given or self._store)
        if given is None:
            kwargs["rank"], kwargs["world_size"] = _RANK, _WORLD
        self._init_process_group(backend, timeout=_COLLECTIVE_LIMIT, **kwargs)

    @staticmethod
    def _new_group(original: typing.Callable) -> typing.Callable:
        @functools.wraps(original)
        def new_group(ranks=None, timeout=None, *args, **kwargs):
            timeout = min(timeout or _COLLECTIVE_LIMIT, _COLLECTIVE_LIMIT)
            return original(ranks, timeout, *args, **kwargs)

        return new_group

    @staticmethod
    def free_groups_of_parallel_state() -> None:
        """Make `destroy_model_parallel` destroy its groups, which upstream only forgets.

        With gloo, each group holds threads and connections: hundreds of them bring the ranks to a
        halt.
        """
        parallel_state = sys.modules.get("megatron.core.parallel_state")
        if parallel_state is None:
            return
        forget = parallel_state.destroy_model_parallel

        @functools.wraps(forget)
        def destroy_model_parallel():
            groups = filter(None, parallel_state._global_process_group_list or [])
            forget()
            for group in groups:
                if group in dist.distributed_c10d._world.pg_map:
                    dist.destroy_process_group(group)

        parallel_state.destroy_model_parallel = destroy_model_parallel

    def meet(self, message: str) -> list[str] | None:
        """Exchange messages with all ranks; return None if one did not arrive in time."""
        keys = [f"meeting/{self._meetings}/{rank}" for rank in range(_WORLD)]
        self._store.set(keys[_RANK], message)
        self._meetings += 1
        self._initialisations = 0
        try:
            self._store.wait(keys, timedelta(seconds=_TEST_LIMIT_S + 5))
            return [self._store.get(key).decode() for key in keys]
        except dist.DistError:
            return None

    def part(self) -> None:
        """Let rank 0, which serves the store, be the last to leave."""
        keys = [f"left/{rank}" for rank in range(_WORLD)]
        self._store.set(keys[_RANK], "")
        if _RANK == 0:
            self._store.wait(keys, timedelta(seconds=30))

    def renew_groups(self, keep_default: bool) -> None:
        """Destroy all process groups; make a new default one if there was one and it is kept."""
        had_groups = dist.is_initialized()
        parallel_state = sys.modules.get("megatron.core.parallel_state")
        if parallel_state is not None:
            parallel_state.destroy_model_parallel()
        if had_groups:
            dist.destroy_process_group()
            if keep_default:
                self._init("gloo")
        utilities = sys.modules.get("tests.unit_tests.test_utilities")
        if utilities is not None:
            utilities.Utils.inited = False


class Recorder:
    """Writes the outcomes, and waits for the other ranks after each test."""

    def __init__(self) -> None:
        self._ranks = Ranks()
        self._file = _RECORD.open("a")
        self._outcome, self._reason, self._began = "passed", "", 0.0

    def _write(self, **record) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def _record(self, test: str, outcome: str, reason: str) -> None:
        self._write(test=test, outcome=outcome, reason=reason)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        done = set(_DONE.read_text().splitlines()) if _DONE.exists() else set()
        items[:] = [item for item in items if item.nodeid not in done]
        stand_ins.give_tests_local_layers({item.module for item in items})
        self._ranks.free_groups_of_parallel_state()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(collected=[item.nodeid for item in session.items])
        gc.collect()
        gc.freeze()  # imported modules need not be scanned in each collection

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._record(report.nodeid, report.outcome, _reason(report))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None):
        item.config.option.experimental = item.get_closest_marker("experimental") is not None
        self._outcome, self._reason, self._began = "passed", "", time.monotonic()
        self._write(begins=item.nodeid)
        watchdog = threading.Timer(_TEST_LIMIT_S, self._hangs, [item.nodeid])
        watchdog.daemon = True
        watchdog.start()
        try:
            result = yield
        finally:
            watchdog.cancel()
        self._finish(item, nextitem)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and self._outcome != "failed":
            self._outcome, self._reason = report.outcome, _reason(report)

    def _finish(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        self._record(item.nodeid, self._outcome, self._reason)
        broken = self._outcome == "failed" and _BROKEN_GROUPS.search(self._reason)
        outcomes = self._ranks.meet("broken" if broken else self._outcome)
        if outcomes is None:
            self._end(f"not all ranks reached the end of {item.nodeid}")
        same_file = nextitem is not None and nextitem.path == item.path
        diverged = "broken" in outcomes or ("failed" in outcomes and len(set(outcomes)) > 1)
        if diverged or not same_file:
            self._ranks.renew_groups(keep_default=same_file)
        if not same_file or time.monotonic() - self._began > _LONG_TEST_S:
            _free_memory()

    def pytest_sessionfinish(self) -> None:
        self._ranks.part()

    def _hangs(self, test: str) -> None:
        reason = f"over {_TEST_LIMIT_S:g} s"
        self._record(test, "hung", reason)
        self._end(f"{test}: {reason}")

    @staticmethod
    def _end(why: str) -> None:
        with _RECORD.with_suffix(".stacks").open("a") as stacks:
            print(why, file=stacks, flush=True)
            faulthandler.dump_traceback(all_threads=True, file=stacks)
        os._exit(70)


def _free_memory() -> None:
    """Return tests' memory to the system: models are in cycles, and ranks share memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _reason(report) -> str:
    """Return the message of a failure or skip, in one line."""
    longrepr = report.longrepr
    if isinstance(longrepr, tuple):
        text = longrepr[2]
    elif getattr(longrepr, "reprcrash", None) is not None:
        text = longrepr.reprcrash.message
    else:  # a collection error: the last line names the exception
        text = str(longrepr).strip().splitlines()[-1]
    return " ".join(text.split())[:400]


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder."""
    config.pluginmanager.register(Recorder(), "upstream-recorder")
