# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Pytest plugin for one CPU rank that runs upstream's own tests (`-p upstream_rank`).

It writes the outcome of each test as a JSON line, and keeps the ranks together: all start a test at
once, and one that hangs ends with its stacks in a file, whereupon torchrun ends the others.
"""

import ctypes
import faulthandler
import functools
import gc
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import stand_ins
import torch.distributed as dist

_RANK, _WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
_FOLDER = Path(os.environ["UPSTREAM_TESTS_FOLDER"])
_TEST_LIMIT_S = float(os.environ["UPSTREAM_TESTS_TEST_LIMIT_S"])
_COLLECTION_LIMIT_S, _END_LIMIT_S = 240, 30
_COLLECTIVE_LIMIT = timedelta(seconds=30)
_STACKS = (_FOLDER / f"rank{_RANK}.stacks").open("w")
_LONG_TEST_S = 0.5

stand_ins.install()
# A test for GPUs of 80 GB shall harm no other program: the system ends this one first.
Path("/proc/self/oom_score_adj").write_text("1000")


def end_after(seconds: float) -> None:
    """End this rank, with its stacks, if this is not called again in so many seconds."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STACKS)


class Ranks:
    """The ranks of this world: the store that torchrun serves, and their process groups."""

    def __init__(self) -> None:
        store, _, _ = next(dist.rendezvous("env://"))
        self._store = dist.PrefixStore("upstream-tests", store)
        self._meetings = self._initialisations = 0
        self._init_process_group, new_group = dist.init_process_group, dist.new_group
        dist.distributed_c10d.default_pg_timeout = _COLLECTIVE_LIMIT

        @functools.wraps(new_group)
        def new_group_in_time(ranks=None, timeout=None, *args, **kwargs):
            timeout = min(timeout or _COLLECTIVE_LIMIT, _COLLECTIVE_LIMIT)
            return new_group(ranks, timeout, *args, **kwargs)

        for module in (dist, dist.distributed_c10d):
            module.init_process_group, module.new_group = self._init, new_group_in_time

    def _init(self, backend=None, init_method=None, timeout=None, **kwargs) -> None:
        # Each time a new prefix: otherwise gloo would find the addresses of earlier groups.
        self._initialisations += 1
        given = kwargs.pop("store", None)
        prefix = f"groups/{self._meetings}/{self._initialisations}"
        kwargs["store"] = dist.PrefixStore(prefix, given or self._store)
        if given is None:
            kwargs["rank"], kwargs["world_size"] = _RANK, _WORLD
        self._init_process_group(backend, timeout=_COLLECTIVE_LIMIT, **kwargs)

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

    def meet(self, message: str) -> list[str]:
        """Exchange messages with all ranks; raise DistStoreError if one does not come."""
        keys = [f"meeting/{self._meetings}/{rank}" for rank in range(_WORLD)]
        self._store.set(keys[_RANK], message)
        self._meetings += 1
        self._initialisations = 0
        self._store.wait(keys, timedelta(seconds=_TEST_LIMIT_S + 5))
        return [self._store.get(key).decode() for key in keys]

    def renew_groups(self, keep_default: bool) -> None:
        """Destroy all process groups; make a new default one if there was one and it is kept."""
        had_groups = dist.is_initialized()
        if parallel_state := sys.modules.get("megatron.core.parallel_state"):
            parallel_state.destroy_model_parallel()
        if had_groups:
            dist.destroy_process_group()
            if keep_default:
                self._init("gloo")
        if utilities := sys.modules.get("tests.unit_tests.test_utilities"):
            utilities.Utils.inited = False


class Recorder:
    """Writes the outcomes, and waits for the other ranks after each test."""

    def __init__(self) -> None:
        end_after(_COLLECTION_LIMIT_S)
        self._ranks = Ranks()
        self._file = (_FOLDER / f"rank{_RANK}.jsonl").open("a")
        self._outcome, self._reason, self._began = "passed", "", 0.0

    def _write(self, *record) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        done = set((_FOLDER / "done").read_text().splitlines())
        items[:] = [item for item in items if item.nodeid not in done]
        stand_ins.give_tests_local_layers({item.module for item in items})
        self._ranks.free_groups_of_parallel_state()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write("collected", [item.nodeid for item in session.items])
        gc.collect()
        gc.freeze()  # imported modules need not be scanned in each collection

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._write("ends", report.nodeid, report.outcome, _reason(report))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None):
        item.config.option.experimental = item.get_closest_marker("experimental") is not None
        self._outcome, self._reason, self._began = "passed", "", time.monotonic()
        self._write("begins", item.nodeid)
        end_after(_TEST_LIMIT_S)
        result = yield
        end_after(_TEST_LIMIT_S + _END_LIMIT_S)  # for the other ranks
        self._write("ends", item.nodeid, self._outcome, self._reason)
        self._meet(item, nextitem)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and self._outcome != "failed":
            self._outcome, self._reason = report.outcome, _reason(report)

    def _meet(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        outcomes = self._ranks.meet(self._outcome)
        same_file = nextitem is not None and nextitem.path == item.path
        if "failed" in outcomes or not same_file:
            self._ranks.renew_groups(keep_default=same_file)
        if not same_file or time.monotonic() - self._began > _LONG_TEST_S:
            # Return tests' memory to the system: models are in cycles, and ranks share memory.
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)

    def pytest_unconfigure(self) -> None:
        """End the processes that tests have left."""
        end_after(_END_LIMIT_S)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)  # torchrun gives each rank a process group


def _reason(report) -> str:
    """Return the message of a failure or skip, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr).strip().splitlines()[-1]
    return " ".join(text.split())[:400]


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder."""
    config.pluginmanager.register(Recorder(), "upstream-recorder")
