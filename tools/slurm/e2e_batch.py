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
from e2e_results import Result, junit, table, write_whole

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "examples/mimo/pretrain_nemotron_vlm.py"
SOURCES = ("megatron_overlay", "examples", "patches")
KILL_AFTER_S = 40
"""Seconds that torchrun has to end its ranks after a case's time; its own limit is 30 s."""

STARTING_S = 120
"""Seconds that srun may take in addition to the case's own time, to start and to end."""


@dataclass(frozen=True)
class Allocation:
    """The resources that Slurm gave the job, or those of this host.

    Attributes:
        gpus: number of GPUs on each node.
        here: whether the cases run on this host, without Slurm.
    """

    job: str
    nodes: int
    gpus: int
    here: bool = False

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Allocation | None:
        """Return this process's allocation; None outside of Slurm."""
        if "SLURM_JOB_ID" not in environment:
            return None
        gpus = int(environment.get("SLURM_GPUS_ON_NODE", "0"))
        return cls(environment["SLURM_JOB_ID"], int(environment["SLURM_JOB_NUM_NODES"]), gpus)

    def nodes_for(self, ranks: int) -> int:
        """Return the largest number of nodes that divides the ranks."""
        return max(n for n in range(1, self.nodes + 1) if ranks % n == 0)


@dataclass
class Batch:
    """The cases of one output directory.

    Attributes:
        chosen: the cases to run, those that others need first.
        allocation: the allocation to run them in.
        out: a directory that all nodes see.
        options: options of the command line, about the ranks' interpreter and container.
    """

    chosen: list[Case]
    allocation: Allocation
    out: Path
    options: argparse.Namespace

    def __post_init__(self) -> None:
        self.cases = {case.name: case for case in self.chosen}
        self.checkout, self.directory = self.out / "Megatron-LM", self.out / "cases"
        self.results: dict[str, Result] = {}

    def run(self) -> bool:
        """Run the cases that are not done yet; return whether all passed."""
        for name, case in self.cases.items():
            key, directory = self._key(case), self.directory / name
            result, earlier = Result.read(directory), ", in an earlier run"
            if not (result and result.holds(key, self.allocation.job)):
                result, earlier = self._run_case(case, key), ""
                result.write(directory)
            self.results[name] = result
            print(f"{name}: {result.message or 'passed'}{earlier}", flush=True)
            write_whole(self.out / "junit.xml", junit(self.results, self.directory))
        summary = table(self.results)
        write_whole(self.out / "summary.txt", summary + "\n")
        print(f"\n{summary}\nlogs: {self.directory}/NAME/log.txt", flush=True)
        return not any(result.message for result in self.results.values())

    def _run_case(self, case: Case, key: str) -> Result:
        directory = self.directory / case.name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        start = time.monotonic()
        message = self._missing(case) or self._launch(case) or what_is_wrong(case, self.directory)
        return Result(message, time.monotonic() - start, key, self.allocation.job)

    def _missing(self, case: Case) -> str:
        for name in case.needs:
            if self.results[name].message:
                return f"not run: it needs {name}, which failed"
        ranks_per_node = case.ranks // self.allocation.nodes_for(case.ranks)
        if case.device == "gpu" and ranks_per_node > self.allocation.gpus:
            return f"not run: it needs {ranks_per_node} GPUs a node, of {self.allocation.gpus}"
        return ""

    def _launch(self, case: Case) -> str:
        """Start the ranks and wait for them; return what went wrong, or an empty text."""
        limit_s = case.limit_s + KILL_AFTER_S + STARTING_S
        with (self.directory / case.name / "log.txt").open("w") as log:
            try:
                code = subprocess.run(
                    self._command(case),
                    cwd=self.checkout if self.allocation.here else None,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | ({"OMP_NUM_THREADS": "1"} if case.device == "cpu" else {}),
                    timeout=limit_s,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return f"srun did not end in {limit_s} s"
        if code in (124, 137):
            return f"it took longer than {case.limit_s} s"
        return f"exit code {code}" if code else ""

    def _command(self, case: Case) -> list[str]:
        nodes = self.allocation.nodes_for(case.ranks)
        image, host = self.options.container_image, socket.gethostname()
        start = ["srun", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", 1]
        start += ["--cpu-bind=none", "--kill-on-bad-exit=1", "--label", "--job-name", case.name]
        start += ["--chdir", self.checkout]
        if image:
            mounts = filter(None, (f"{self.out}:{self.out}", self.options.container_mounts))
            start += [f"--container-image={image}", f"--container-mounts={','.join(mounts)}"]
            start += [f"--container-workdir={self.checkout}"]
        if self.allocation.here:
            start, host = [], "localhost"
        start += ["timeout", f"--kill-after={KILL_AFTER_S}", case.limit_s]
        start += [self.options.python or ("python3" if image else sys.executable)]
        start += ["-m", "torch.distributed.run", "--nnodes", nodes]
        start += ["--nproc-per-node", case.ranks // nodes, "--rdzv-backend", "c10d"]
        start += ["--rdzv-endpoint", f"{host}:{_free_port()}"]
        start += ["--rdzv-id", f"{self.allocation.job}-{case.name}"]
        program = [PROGRAM, *case.command_line(self.directory), "--log-file", "-"]
        return [str(part) for part in (*start, *program)]

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
        chosen = choose(read_cases(args.cases, device), args.only)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        for case in chosen:
            print(f"{case.name}: {case.ranks} ranks, {case.limit_s} s, {case.arguments}")
        return 0
    if args.out is None:
        parser.error("OUT is missing: a directory that all nodes see")
    if allocation is None:
        parser.error("this is no Slurm job: sbatch tools/slurm/e2e_batch.sh OUT, or --here")
    out = args.out.absolute()
    prepare(out / "Megatron-LM")
    return 0 if Batch(chosen, allocation, out, args).run() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
