# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Worlds of ranks that run upstream's tests, restarted for the remaining tests when one hangs."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PLUGIN = Path(__file__).parent / "plugin"
TEST_LIMIT_S = 150
"""Seconds after which a test counts as hanging, which ends its world."""

_WORST_FIRST = ("hung", "failed", "passed", "skipped")


class Outcome(NamedTuple):
    """The outcome of a test in one world: passed if it passed on every rank that took part."""

    outcome: str  # one of _WORST_FIRST
    reason: str = ""


Outcomes = dict[str, Outcome]
"""Outcomes by node id; for a file that could not be imported, by its path."""


def passing(outcomes: Outcomes) -> set[str]:
    """Return the tests that pass."""
    return {test for test, found in outcomes.items() if found.outcome == "passed"}


class Comparison(NamedTuple):
    """Outcomes of the tests of one world on both trees."""

    pristine: Outcomes
    applied: Outcomes
    lost: list[str]  # pass on the pristine tree, and fail to pass twice on the applied one
    wavering: list[str]  # pass on the applied tree only at the second attempt


def compare(files: list[str], run: Callable[[str, list[str]], Outcomes]) -> Comparison:
    """Run `files` on both trees; repeat tests that seem lost, as the machine may have been busy.

    `run` takes a tree's name, `pristine`, `applied` or `applied-again`, and the files.
    """
    before, after = run("pristine", files), run("applied", files)
    missing = sorted(passing(before) - passing(after))
    recovered = passing(run("applied-again", _files_of(missing)))
    lost = [test for test in missing if test not in recovered]
    return Comparison(before, after, lost, [test for test in missing if test in recovered])


def _files_of(tests: list[str]) -> list[str]:
    return list(dict.fromkeys(test.split("::")[0] for test in tests))


class World:
    """`size` ranks on this host that run upstream's tests on one tree.

    `cpu_runtime` is the folder of our package; `scratch` is for records, logs and temporary files,
    and is emptied.
    """

    def __init__(self, tree: Path, size: int, cpu_runtime: Path, scratch: Path):
        self._tree, self._size, self._scratch = tree, size, scratch
        self._cpu_runtime = cpu_runtime
        shutil.rmtree(scratch, ignore_errors=True)

    def run(self, files: list[str], excluded: list[str]) -> Outcomes:
        """Run the tests in `files`, paths relative to the tree, and return their outcomes."""
        found: Outcomes = {}
        for attempt in itertools.count():
            if not files:
                return found
            folder = self._scratch / str(attempt)
            folder.mkdir(parents=True)
            (folder / "done").write_text("\n".join([*excluded, *found]))
            self._run_ranks(files, folder)
            collected, outcomes = self._records(folder)
            found |= outcomes
            if collected is None:
                return found | dict.fromkeys(files, Outcome("hung", _last_words(folder)))
            rest = [test for test in collected if test not in found]
            if rest and "hung" not in {outcome for outcome, _ in outcomes.values()}:
                found[rest.pop(0)] = Outcome("hung", _last_words(folder))  # they ended between two
            files = _files_of(rest)

    def _records(self, folder: Path) -> tuple[list[str] | None, Outcomes]:
        """Return the tests that the ranks collected, None if they did not, and the outcomes."""
        collected: list[str] | None = None
        ends: dict[str, list[Outcome]] = {}
        begun: set[str] = set()
        for path in folder.glob("rank*.jsonl"):
            for kind, value, *outcome in map(json.loads, path.read_text().splitlines()):
                if kind == "collected":
                    collected = value
                elif kind == "begins":
                    begun.add(value)
                else:
                    ends.setdefault(value, []).append(Outcome(*outcome))
        found = {
            test: min(outcomes, key=lambda one: _WORST_FIRST.index(one.outcome))
            for test, outcomes in ends.items()
        }
        hung = [test for test in begun if len(ends.get(test, ())) < self._size]
        return collected, found | dict.fromkeys(hung, Outcome("hung", "a rank did not end it"))

    def _run_ranks(self, files: list[str], folder: Path) -> None:
        """Run pytest on every rank until all have ended."""
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", self._size]
        launch += ["--log-dir", folder / "logs", "--redirects", 3, "-m", "pytest"]
        # Without upstream's pytest settings, pytest would find ours in a parent.
        settings = "pyproject.toml" if (self._tree / "pyproject.toml").exists() else os.devnull
        options = ["-p", "upstream_rank", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
        options += ["-o", "addopts=", "--rootdir", ".", "-c", settings]
        options += ["--continue-on-collection-errors", "-q", "--tb=short", "-Wignore", *files]
        with (folder / "log").open("w") as log:
            ranks = subprocess.Popen(
                [sys.executable, *map(str, launch), *map(str, options)],
                cwd=self._tree,
                env=self._environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            ranks.wait()
        finally:
            ranks.terminate()  # torchrun ends the ranks
            ranks.wait()

    def _environment(self, folder: Path) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH"))}
        return kept | {
            "PYTHONPATH": os.pathsep.join([str(self._tree), str(PLUGIN)]),
            "PYTHONDONTWRITEBYTECODE": "",  # each rank and attempt would compile Megatron again
            "PYTEST_DEBUG_TEMPROOT": str(folder),
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "2",  # gloo's threads would hold memory of their own each
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "UPSTREAM_TESTS_FOLDER": str(folder),
            "UPSTREAM_TESTS_CPU_RUNTIME": str(self._cpu_runtime),
            "UPSTREAM_TESTS_TEST_LIMIT_S": str(TEST_LIMIT_S),
        }


def _last_words(folder: Path) -> str:
    logs = [log.read_text(errors="replace") for log in folder.glob("logs/**/0/*.log")]
    lines = "\n".join(logs).strip().splitlines()
    return f"the ranks ended: {lines[-1] if lines else 'no output'}"
