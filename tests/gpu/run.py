# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Prove on one or two GPUs what CPU ranks cannot, and write down each case with its figure.

    python tests/gpu/run.py [--json FILE] [--shared] [pytest arguments]   usually by `make test-gpu`

With ``--shared`` two ranks take turns on one GPU, where each of their collectives takes 2 ms or
more: choose cases by pytest's ``-k``.

Lanes run at the same time, the stages of a lane one after the other. The exit code is 0 if every
case of every stage has passed; a case that failed, was skipped or never ended is named. A signal
ends the stages, and the cases until then are still written.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKOUT = Path(os.environ.get("CHECKOUT", REPOSITORY / "build" / "Megatron-LM")).absolute()
sys.path[:0] = [str(CHECKOUT), str(REPOSITORY / "tools/bench")]

import torch  # noqa: E402
from vlm import machine  # noqa: E402

from examples.mimo.pretrain_nemotron_vlm import at_start  # noqa: E402

UNTUNED = Path(__file__).with_name("untuned")
"""Python finds this folder first, and imports the ``sitecustomize`` in it."""

LIBRARIES = """
    transformer_engine.pytorch mamba_ssm causal_conv1d fla transformers.models.nemotron_h_omni
    megatron.energon av flash_attn.cute psutil pytest""".split()
"""Modules that the lanes import; without one, hundreds of cases would fail or prove nothing."""

LIMIT_S = 900
"""Time limit of a stage."""

WITHOUT_TF32 = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
"""Variables that cuBLAS, cuDNN and Triton read: fp32 products keep all of their digits."""

CASES = "tests/gpu"
PROGRAMS = ("tests/gpu/test_restarts.py", "tests/gpu/test_upstream_scripts.py")
AHEAD = "tests/gpu/test_rows.py::test_two_gpus_run_ahead"
IN_16_BITS = "tests/gpu/test_rows.py::TestIn16Bits"
KERNELS = "tests/gpu/test_recurrence.py"
WAITS = "tests/gpu/test_host_waits.py"
STATE = "tests/gpu/test_state.py"
ON_ONE = ("tests/gpu/test_attention.py", "tests/gpu/test_soak.py")
UNITS = "tests/unit_tests"
LOOP = f"{UNITS}/examples/nemotron_vlm/loop"
REPLACED = (f"{UNITS}/ssm", f"{LOOP}/test_rows.py")
"""Unit tests whose place the cases take on two GPUs: of recurrent layers, each length of which
compiles Triton's kernels anew (`test_recurrence.py` has fewer), and the rows of CPU ranks."""
LEFT_OUT = {UNITS: (*REPLACED, LOOP), LOOP: REPLACED}
"""Folders and files that the stage of a folder leaves out."""

UNITS_OF_ONE = ("checkpoint/test_omni.py", "ssm")
UNITS_OF_ONE += ("models/mimo/schedule/test_mimo_gradients.py",)
UNITS_OF_ONE += ("tensor_parallel/test_weight_gradient.py",)
UNITS_OF_ONE += tuple(
    f"examples/nemotron_vlm/{path}"
    for path in (
        "model/test_training_parts.py::test_packed_samples_train_as_samples_one_by_one",
        "loop/test_loop.py",
        "loop/test_metrics.py",
    )
)


@dataclass(frozen=True)
class Stage:
    """A call of pytest on ``ranks`` ranks; ``first`` is the first rank's GPU."""

    name: str
    ranks: int
    paths: tuple[str, ...]
    first: int = 0

    def environment(self, gpus: int) -> dict[str, str]:
        """Return the variables that libraries read at their start, as the program sets them."""
        found = at_start(["--cuda-graph-impl", "local"] if AHEAD in self.paths else [])[1]
        if self.paths[0] not in PROGRAMS:
            chosen = {min(self.first + rank, gpus - 1) for rank in range(self.ranks)}
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, sorted(chosen)))
        return found

    def command(self, record: Path, arguments: list[str]) -> list[str]:
        """The command line."""
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        launch = launch if self.ranks == 2 else []
        pytest = ["-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
        elsewhere = (*PROGRAMS, AHEAD, IN_16_BITS, KERNELS, WAITS, STATE, *ON_ONE)
        others = [path for path in elsewhere if path not in self.paths]
        left_out = [f"--deselect={path}" for path in others]
        left_out += [f"--ignore={path}" for path in LEFT_OUT.get(self.paths[0], ())]
        rest = ["--record", str(record), *left_out, *self.paths, *arguments]
        return [sys.executable, "-W", "ignore", *launch, *pytest, *rest]


def lanes(ranks: int) -> list[list[Stage]]:
    """Return the lanes that run at the same time, with stages of at most ``ranks`` ranks.

    Lanes share GPUs: processes take turns on one, and a collective waits until both of its ranks
    have their turn. The first two lanes begin with the runs that those of two GPUs are compared
    with.
    """
    units = tuple(f"{UNITS}/{path}" for path in UNITS_OF_ONE)
    others = Stage("attention, waits and memory", 1, (*ON_ONE, WAITS))
    found = [
        [Stage("cases on one GPU", 1, (CASES,))],
        [Stage("16-bit cases on one GPU", 1, (IN_16_BITS,), first=ranks - 1)],
        [Stage("unit tests on one GPU", 1, units, first=ranks - 1)],
        [others],
        [Stage(Path(path).stem, 1, (path,)) for path in PROGRAMS],
        [Stage("state on one GPU", 1, (STATE,), first=ranks - 1)],
    ]
    if ranks == 2:
        found[-1].append(Stage("state on two GPUs", 2, (STATE,)))
        ahead = Stage("cases that run ahead", 2, (AHEAD,))
        kernels = Stage("recurrent kernels and waits on two GPUs", 2, (KERNELS, WAITS))
        found.append([Stage("cases on two GPUs", 2, (CASES,))])
        found.append([Stage("16-bit cases on two GPUs", 2, (IN_16_BITS,))])
        found.append([kernels, ahead])
        found.append([Stage("unit tests on two GPUs", 2, (UNITS,))])
        found.append([Stage("unit tests of the loop on two GPUs", 2, (LOOP,))])
    return found


def main(arguments: list[str]) -> int:
    """Run all stages; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the cases and their figures")
    parser.add_argument("--shared", action="store_true", help="two ranks, also on one GPU")
    own, rest = parser.parse_known_args(arguments)
    gpus = min(2, torch.cuda.device_count())
    if gpus == 0:
        print("error: PyTorch finds no GPU here; make test proves the rest", file=sys.stderr)
        return 2
    if lack := lacking(LIBRARIES):
        print(f"error: {sys.executable} cannot import {lack}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="one-rank-runs-") as shared:
        ranks = 2 if own.shared else gpus
        environment = {"RANKS": str(ranks), "SHARED_GPU": str(int(ranks > gpus))}
        environment |= {"ONE_RANK_RUNS": shared}
        chosen = lanes(ranks)
        with ThreadPoolExecutor(len(chosen)) as pool:
            given = [(lane, rest, gpus, environment) for lane in chosen]
            cases = [case for found in pool.map(lambda each: _run(*each), given) for case in found]
    wrong = [case for case in cases if case["outcome"] != "passed"]
    for case in wrong:
        reason = case.get("reason", "")
        print(f"{case['outcome']}: {case['stage']}: {case['test']} {reason}".rstrip())
    seconds = round(time.monotonic() - started)
    counts = f"{len(cases) - len(wrong)} of {len(cases)} cases passed"
    print(f"{counts} with {ranks} ranks on {gpus} GPUs in {seconds} s")
    if own.json:
        write(own.json, {"machine": machine(), "commit": _commit(), "seconds": seconds}, cases)
    return 1 if wrong or not cases else 0


_IMPORT = """
import importlib, os, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        print(f"{name}: {type(error).__name__}:", *str(error).split(), flush=True)
        os._exit(1)
"""


def lacking(names: list[str]) -> str:
    """Import modules in a process of its own, as some start CUDA. Return the first one that cannot
    be imported, with the error, or nothing.
    """
    command = [sys.executable, "-W", "ignore", "-c", _IMPORT, *names]
    environment = os.environ | {"PYTHONPATH": _search_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.stdout.strip().split("\n")[-1] if done.returncode else ""


def _search_path() -> str:
    """Python's search path of the lanes."""
    ours = [str(UNTUNED), str(CHECKOUT), str(REPOSITORY)]
    return os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")])


def write(path: Path, facts: dict, cases: list[dict]) -> None:
    """Write the JSON, a case a line."""
    head = json.dumps(facts)[:-1]
    lines = ",\n".join(map(json.dumps, cases))
    path.write_text(f'{head}, "cases": [\n{lines}\n]}}\n')


def _run(lane: list[Stage], arguments: list[str], gpus: int, shared: dict[str, str]) -> list[dict]:
    """Run a lane's stages with variables that all stages share; returns their cases."""
    found = []
    for stage in lane:
        environment = os.environ | stage.environment(gpus) | WITHOUT_TF32 | shared
        environment |= {
            "PYTHONPATH": _search_path(),
            "CHECKOUT": str(CHECKOUT),
            "OMP_NUM_THREADS": "2",
        }
        folder = Path(shared["ONE_RANK_RUNS"])
        record, log = folder / f"{stage.name}.jsonl", folder / f"{stage.name}.log"
        if ending.is_set():
            break
        with log.open("w") as file:
            code = _ended(stage.command(record, arguments), environment, file)
        cases = _cases(stage, record, code)
        found += cases
        if any(case["outcome"] != "passed" for case in cases):
            print(f"\n===== {stage.name}\n{log.read_text(errors='replace')}", flush=True)
        else:
            print(f"===== {stage.name}: {len(cases)} passed", flush=True)
    return found


ending = threading.Event()
"""Set by a signal."""

running: set[int] = set()
"""Process groups of the stages under way."""


def _end(*_) -> None:
    ending.set()
    for group in tuple(running):
        _send(group, signal.SIGTERM)


def _send(group: int, number: signal.Signals) -> None:
    """Send a process group a signal. SIGTERM reaches the ranks, too: torchrun ends them, which are
    no part of its group.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _ended(command: list[str], environment: dict[str, str], output) -> int:
    """Return a command's exit code; -1 if it took too long, and then end all that it started."""
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    running.add(process.pid)
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        _send(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        _send(process.pid, signal.SIGKILL)
        return -1
    finally:
        running.discard(process.pid)


def _cases(stage: Stage, record: Path, code: int) -> list[dict]:
    """The outcomes of a stage's cases.

    A test for another number of ranks is no case of the stage, nor is a unit test that is skipped
    because it is for CPU ranks only.
    """
    lines = record.read_text().splitlines() if record.exists() else []
    records = [json.loads(line) for line in lines]
    collected = next((line["collected"] for line in records if "collected" in line), [])
    ended = {line["test"]: line for line in records if "test" in line}
    cases = []
    for test in collected:
        case = ended.get(test, {"test": test, "outcome": "missing"})
        is_skipped = case["outcome"] == "skipped"
        is_of_another_world = is_skipped and " ranks, this run has " in case["reason"]
        if not is_of_another_world and not (is_skipped and test.startswith(UNITS)):
            cases.append({"stage": stage.name, **case})
    reasons = Counter(case["reason"] for case in ended.values() if case["outcome"] == "skipped")
    for reason, count in reasons.items():
        if "could not import" in reason:
            print(f"{stage.name}: left out {count} tests: {reason}", flush=True)
    has_failed = any(case["outcome"] != "passed" for case in cases)
    if (code != 0 and not has_failed) or not collected:
        reason = f"exit {code}" if code else "no test was found"
        failed = {"test": "the stage", "outcome": "failed", "reason": reason}
        cases.append({"stage": stage.name, **failed})
    return cases


def _commit() -> str:
    """The commit, with + where files differ from it; ``COMMIT`` names it in a tree without git."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    said = ["git", "-C", str(REPOSITORY), "describe", "--always", "--abbrev=12", "--dirty=+"]
    done = subprocess.run(said, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
