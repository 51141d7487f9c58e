# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Worlds of ranks that run upstream's tests, restarted for the remaining tests when one hangs."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from upstream_tests.outcomes import Outcome, Outcomes, file_of, read_records

PLUGIN = Path(__file__).parent / "plugin"
TEST_LIMIT_S = 150
"""Seconds after which a test counts as hanging, which ends its world."""


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
        for attempt in itertools.count():
            folder = self._scratch / str(attempt)
            folder.mkdir()
            (folder / "done").write_text("\n".join([*excluded, *found]))
            self._run_ranks(files, folder)
            collected, outcomes, hung = read_records(folder, self._size)
            found |= outcomes
            if collected is None:
                return found | dict.fromkeys(files, Outcome("hung", _last_words(folder)))
            rest = [test for test in collected if test not in found]
            for test in hung:
                say(f"  hung: {test}")
            if rest and not hung:  # the ranks ended between two tests
                found[rest.pop(0)] = Outcome("hung", _last_words(folder))
            if not rest:
                return found
            files = list(dict.fromkeys(map(file_of, rest)))

    def _run_ranks(self, files: list[str], folder: Path) -> None:
        """Run pytest on every rank until all have ended."""
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", self._size]
        launch += ["--log-dir", folder / "logs", "--redirects", 3, "-m", "pytest"]
        # Without upstream's pytest settings, pytest would find ours in a parent.
        settings = "pyproject.toml" if (self._tree / "pyproject.toml").exists() else os.devnull
        options = ["-p", "upstream_rank", "-p", "no:cacheprovider", "-o", "addopts="]
        options += ["--rootdir", ".", "-c", settings, "--continue-on-collection-errors"]
        options += ["-q", "--tb=short", "-Wignore", *files]
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
