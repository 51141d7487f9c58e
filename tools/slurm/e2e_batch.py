# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Run the end-to-end cases, each in its own torchrun, in a Slurm job or here: docs/user/slurm.md.

Exit status: 0 all passed, 1 a case failed, 2 usage.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from e2e_cases import DEVICES, Case, choose, read_cases, what_is_wrong
from e2e_results import Result, junit, read_result, table, write_result, write_whole

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "examples/mimo/pretrain_nemotron_vlm.py"
SOURCES = ("megatron_overlay", "examples", "patches")
KILL_AFTER_S = 40
"""Seconds that torchrun has to end its ranks after a case's time; its own limit is 30 s."""

STARTING_S = 120
"""Seconds that srun may take in addition to the case's own time, to start and to end."""


@dataclass(frozen=True)
class Allocation:
    """The resources that Slurm gave the job, or those of this host."""

    job: str
    nodes: int
    gpus: int
    """GPUs on each node."""

    here: bool = False
    """Whether the cases run on this host, without Slurm."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Allocation | None:
        """Return this process's allocation; None outside of Slurm."""
        if "SLURM_JOB_ID" not in environment:
            return None
        return cls(
            job=environment["SLURM_JOB_ID"],
            nodes=int(environment["SLURM_JOB_NUM_NODES"]),
            gpus=int(environment.get("SLURM_GPUS_ON_NODE", "0")),
        )

    def nodes_for(self, ranks: int) -> int:
        """Return the largest number of nodes that divides the ranks."""
        return max(n for n in range(1, self.nodes + 1) if ranks % n == 0)


class Batch:
    """The cases of one output directory.

    Args:
        chosen: the cases to run, those that others need first.
        allocation: the allocation to run them in.
        out: a directory that all nodes see.
        python: the ranks' interpreter.
        container: srun's options that start a container.
    """

    def __init__(
        self,
        chosen: list[Case],
        allocation: Allocation,
        out: Path,
        python: str,
        container: list[str],
    ) -> None:
        self.cases = {case.name: case for case in chosen}
        self.allocation, self.python, self.container = allocation, python, container
        self.checkout, self.directory, self.out = out / "Megatron-LM", out / "cases", out
        self.results: dict[str, Result] = {}

    def run(self) -> bool:
        """Run the cases that are not done yet; return whether all passed."""
        for case in self.cases.values():
            key, directory = self._key(case), self.directory / case.name
            result = read_result(directory)
            before = bool(result and result.holds(key, self.allocation.job))
            if not before:
                result = self._run_case(case, key)
                write_result(directory, result)
            self.results[case.name] = result
            outcome = result.message or "passed"
            print(f"{case.name}: {outcome}{', in an earlier run' if before else ''}", flush=True)
            write_whole(self.out / "junit.xml", junit(self.results.values(), self.directory))
        summary = table(self.results.values())
        write_whole(self.out / "summary.txt", summary + "\n")
        print(f"\n{summary}\nlogs: {self.directory}/NAME/log.txt", flush=True)
        return all(result.passed for result in self.results.values())

    def _run_case(self, case: Case, key: str) -> Result:
        directory = self.directory / case.name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        start = time.monotonic()
        message = self._missing(case) or self._launch(case) or what_is_wrong(case, self.directory)
        return Result(case.name, message, time.monotonic() - start, key, self.allocation.job)

    def _missing(self, case: Case) -> str:
        for name in case.needs:
            if not self.results[name].passed:
                return f"not run: it needs {name}, which failed"
        ranks_per_node = case.ranks // self.allocation.nodes_for(case.ranks)
        if case.device == "gpu" and ranks_per_node > self.allocation.gpus:
            return f"not run: it needs {ranks_per_node} GPUs a node, of {self.allocation.gpus}"
        return ""

    def _launch(self, case: Case) -> str:
        """Start the ranks and wait for them; return what went wrong, or an empty text."""
        log_path = self.directory / case.name / "log.txt"
        environment = os.environ | ({"OMP_NUM_THREADS": "1"} if case.device == "cpu" else {})
        with log_path.open("w") as log:
            try:
                code = subprocess.run(
                    self._command(case),
                    cwd=self.checkout if self.allocation.here else None,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    timeout=case.limit_s + KILL_AFTER_S + STARTING_S,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return f"srun did not end in {case.limit_s + KILL_AFTER_S + STARTING_S} s"
        if code in (124, 137):
            return f"it took longer than {case.limit_s} s"
        return f"exit code {code}" if code else ""

    def _command(self, case: Case) -> list[str]:
        nodes = self.allocation.nodes_for(case.ranks)
        srun = ["srun", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", 1]
        srun += ["--cpu-bind=none", "--kill-on-bad-exit=1", "--label", "--job-name", case.name]
        srun += ["--chdir", self.checkout, *self.container]
        host = "localhost" if self.allocation.here else socket.gethostname()
        torchrun = [self.python, "-m", "torch.distributed.run", "--nnodes", nodes]
        torchrun += ["--nproc-per-node", case.ranks // nodes, "--rdzv-backend", "c10d"]
        torchrun += ["--rdzv-endpoint", f"{host}:{_free_port()}"]
        torchrun += ["--rdzv-id", f"{self.allocation.job}-{case.name}"]
        limit = ["timeout", f"--kill-after={KILL_AFTER_S}", case.limit_s]
        start = [] if self.allocation.here else srun
        program = [PROGRAM, *case.command_line(self.directory), "--log-file", "-"]
        return [str(part) for part in (*start, *limit, *torchrun, *program)]

    def _key(self, case: Case) -> str:
        """Return a hash of the overlay, the case, its nodes, and the cases that it needs."""
        needed = [self._key(self.cases[name]) for name in case.needs]
        parts = (_sources_hash(), case, self.allocation.nodes_for(case.ranks), needed)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def _sources_hash() -> str:
    """Return a hash of every file of the overlay."""
    digest = hashlib.sha256()
    for path in sorted(path for source in SOURCES for path in (ROOT / source).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def prepare(checkout: Path) -> None:
    """Unpack a pristine upstream, unless there is a checkout already, and apply the overlay."""
    for tool in ("fetch_upstream.sh", "apply_overlay.sh"):
        subprocess.run([ROOT / "tools" / tool, checkout], check=True)


def container_options(image: str | None, mounts: str | None, out: Path) -> list[str]:
    """Return srun's options for pyxis, with the output directory and ``mounts`` mounted."""
    if not image:
        return []
    mounted = f"{out}:{out}" + (f",{mounts}" if mounts else "")
    workdir = f"--container-workdir={out / 'Megatron-LM'}"
    return [f"--container-image={image}", f"--container-mounts={mounted}", workdir]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="e2e_batch.sh", description=__doc__.split(":")[0])
    parser.add_argument("out", nargs="?", type=Path, help="directory that all nodes see")
    parser.add_argument("--list", action="store_true", help="name the cases, run none")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="of names")
    parser.add_argument("--device", choices=DEVICES, help="gpu if the job has any")
    parser.add_argument("--cases", type=Path, default=Path(__file__).with_name("cases.toml"))
    parser.add_argument("--here", type=int, metavar="GPUS", help="no Slurm: on this host's GPUs")
    parser.add_argument("--container-image", metavar="IMAGE", help="for the ranks, with pyxis")
    parser.add_argument("--container-mounts", metavar="MOUNTS", help="beside the output directory")
    parser.add_argument("--python", help="of the ranks: this one, and python3 in a container")
    return parser


def main(arguments: list[str]) -> int:
    """Run the command line; return its exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    allocation = Allocation.read(os.environ)
    if args.here is not None:
        allocation = Allocation(f"here-{time.time_ns()}", nodes=1, gpus=args.here, here=True)
    device = args.device or ("gpu" if allocation and allocation.gpus else "cpu")
    try:
        chosen = choose(read_cases(args.cases), device, args.only)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        for case in chosen:
            arguments = " ".join(case.arguments.split())
            print(f"{case.name}: {case.ranks} ranks, {case.limit_s} s, {arguments}")
        return 0
    if args.out is None:
        parser.error("OUT is missing: a directory that all nodes see")
    if allocation is None:
        parser.error("this is no Slurm job: sbatch tools/slurm/e2e_batch.sh OUT, or --here")
    out = args.out.absolute()
    prepare(out / "Megatron-LM")
    python = args.python or ("python3" if args.container_image else sys.executable)
    container = container_options(args.container_image, args.container_mounts, out)
    return 0 if Batch(chosen, allocation, out, python, container).run() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
