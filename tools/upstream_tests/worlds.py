# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Worlds of ranks that run upstream's tests, restarted for the remaining tests when one hangs."""

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from upstream_tests.outcomes import Outcome, Outcomes, file_of, read_records

PLUGIN = Path(__file__).parent / "plugin"
TEST_LIMIT_S = 150
"""Seconds after which a test counts as hanging, which ends its world."""
COLLECTIVE_LIMIT_S = 30
_SILENCE_LIMIT_S = TEST_LIMIT_S + 240
"""Most seconds that a world may write nothing, including its start and collection."""
_MEMORY_LIMIT = 0.6 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""Bytes that all ranks may hold, so that a test for GPUs of 80 GB does not harm other programs."""
_END_LIMIT_S = 5
"""Seconds that the other ranks have to end after the first one has."""


class World:
    """`size` ranks on this host that run upstream's tests on one tree.

    `cpu_runtime` is the folder of our package; `scratch` is for records, logs and temporary files,
    and is emptied.
    """

    def __init__(self, tree: Path, size: int, cpu_runtime: Path, scratch: Path):
        self._tree, self._size, self._scratch = tree, size, scratch
        self._cpu_runtime = cpu_runtime
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)

    def run(self, files: list[str], excluded: list[str], say: Callable[[str], None]) -> Outcomes:
        """Run the tests in `files`, paths relative to the tree, and return their outcomes."""
        found: Outcomes = {}
        remaining = list(files)
        for attempt in itertools.count():
            folder = self._scratch / str(attempt)
            folder.mkdir()
            (folder / "done").write_text("\n".join([*excluded, *found]))
            self._run_ranks(remaining, folder)
            records = read_records(folder, self._size)
            found |= records.outcomes
            if records.collected is None:
                return found | dict.fromkeys(remaining, Outcome("crashed", _last_words(folder)))
            rest = [test for test in records.collected if test not in found]
            for test in records.fatal:
                say(f"  {found[test].outcome}: {test}")
            if rest and not records.fatal:  # the ranks ended between two tests
                found[rest.pop(0)] = Outcome("crashed", _last_words(folder))
            if not rest:
                return found
            remaining = list(dict.fromkeys(file_of(test) for test in rest))

    def _run_ranks(self, files: list[str], folder: Path) -> None:
        """Run pytest on every rank until all have ended or are killed."""
        environment = self._environment(folder)
        options = ["-p", "upstream_rank", "-p", "no:cacheprovider", "-o", "addopts="]
        options += ["--rootdir", ".", "-c", self._configuration()]
        options += ["--continue-on-collection-errors"]
        command = [sys.executable, "-m", "pytest", *options, "-q", "--tb=short", "-Wignore", *files]
        ranks = []
        for rank in range(self._size):
            with (folder / f"rank{rank}.log").open("w") as log:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(
                    subprocess.Popen(
                        command,
                        cwd=self._tree,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        try:
            self._watch(ranks, folder)
        finally:
            for rank in ranks:
                _end_session(rank)

    def _configuration(self) -> str:
        """Return upstream's pytest settings; without them, pytest would find ours in a parent."""
        return "pyproject.toml" if (self._tree / "pyproject.toml").exists() else os.devnull

    def _environment(self, folder: Path) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH"))}
        return kept | {
            "PYTHONPATH": os.pathsep.join([str(self._tree), str(PLUGIN)]),
            "PYTHONDONTWRITEBYTECODE": "",  # each rank and attempt would compile Megatron again
            "PYTEST_DEBUG_TEMPROOT": str(folder),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(self._size),
            "LOCAL_WORLD_SIZE": str(self._size),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the plugin serves the store, as torchrun does
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "2",  # gloo's threads would hold memory of their own each
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "UPSTREAM_TESTS_RECORDS": str(folder),
            "UPSTREAM_TESTS_CPU_RUNTIME": str(self._cpu_runtime),
            "UPSTREAM_TESTS_TEST_LIMIT_S": str(TEST_LIMIT_S),
            "UPSTREAM_TESTS_COLLECTIVE_LIMIT_S": str(COLLECTIVE_LIMIT_S),
        }

    @staticmethod
    def _watch(ranks: list[subprocess.Popen], folder: Path) -> None:
        """Return when all ranks have ended, or when the rest must be killed."""
        first_end = None
        while any(rank.poll() is None for rank in ranks):
            time.sleep(0.2)
            now = time.time()
            if first_end is None and any(rank.poll() is not None for rank in ranks):
                first_end = now
            if first_end is not None and now - first_end > _END_LIMIT_S:
                return
            if sum(map(_resident_bytes, ranks)) > _MEMORY_LIMIT:
                return
            if now - max(path.stat().st_mtime for path in folder.iterdir()) > _SILENCE_LIMIT_S:
                return


def _end_session(rank: subprocess.Popen) -> None:
    """Kill the rank and all processes that it started, which are in its session."""
    try:
        os.killpg(rank.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    rank.wait()


def _resident_bytes(rank: subprocess.Popen) -> int:
    try:
        pages = Path(f"/proc/{rank.pid}/statm").read_text().split()[1]
    except (OSError, IndexError):  # it has ended
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _last_words(folder: Path) -> str:
    log = (folder / "rank0.log").read_text(errors="replace").strip().splitlines()
    return f"the ranks ended: {log[-1] if log else 'no output'}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
