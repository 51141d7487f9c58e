# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Prove on one or two GPUs what CPU ranks cannot, and write down each case with its figure.

    python tests/gpu/run.py [--json FILE] [--shared] [pytest arguments]   usually by `make test-gpu`

With ``--shared`` two ranks take turns on one GPU, where each of their collectives takes 2 ms or
more: choose cases by pytest's ``-k``.

Lanes run at the same time, the stages of a lane one after the other. The exit code is 0 if every
case of every stage has passed; a case that failed, was skipped or never ended is named. Cases are
written as they end, and a signal ends all stages.
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
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
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

WRITTEN_S = 5
"""Seconds from one writing of the JSON to the next."""

WITHOUT_TF32 = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
"""Variables that cuBLAS, cuDNN and Triton read: fp32 products keep all of their digits."""

CASES = "tests/gpu"
RESTARTS = "tests/gpu/test_restarts.py"
SCRIPTS = "tests/gpu/test_upstream_scripts.py"
AHEAD = "tests/gpu/test_rows.py::test_two_gpus_run_ahead"
IN_16_BITS = "tests/gpu/test_rows.py::TestIn16Bits"
RESUMED = "tests/gpu/test_rows.py::TestResumed"
KERNELS = "tests/gpu/test_recurrence.py"
WAITS = "tests/gpu/test_host_waits.py"
STATE = "tests/gpu/test_state.py"
ON_ONE = tuple(f"tests/gpu/test_{name}.py" for name in ("answers", "attention", "soak"))
APART = (RESTARTS, SCRIPTS, AHEAD, IN_16_BITS, RESUMED, KERNELS, WAITS, STATE, *ON_ONE)
"""What the stages of `CASES` leave out, because other stages take it."""

UNITS, PROGRAM = "tests/unit_tests", "tests/unit_tests/examples/nemotron_vlm"
LEFT_OUT = (f"{UNITS}/ssm", f"{PROGRAM}/energon")
LEFT_OUT += (f"{PROGRAM}/loop/test_rows.py", f"{PROGRAM}/loop/test_saves.py")
"""Unit tests that two GPUs leave out: of recurrent layers, each length of which compiles Triton's
kernels anew (`test_recurrence.py` has fewer), the rows of CPU ranks, and tests of files and of
faults while saving, which prove the same on CPU ranks."""

UNITS_OF_ONE = (
    f"{UNITS}/checkpoint/test_omni.py",
    f"{UNITS}/ssm",
    f"{UNITS}/models/mimo/schedule/test_mimo_gradients.py",
    f"{UNITS}/tensor_parallel/test_weight_gradient.py",
    f"{PROGRAM}/model/test_training_parts.py::test_packed_samples_train_as_samples_one_by_one",
    f"{PROGRAM}/loop/test_loop.py",
    f"{PROGRAM}/loop/test_metrics.py",
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
        if self.paths[0] not in (RESTARTS, SCRIPTS):
            chosen = {min(self.first + rank, gpus - 1) for rank in range(self.ranks)}
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, sorted(chosen)))
        return found

    def command(self, record: Path, arguments: list[str]) -> list[str]:
        """The command line."""
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        launch = launch if self.ranks == 2 else []
        pytest = ["-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
        left_out = [f"--deselect={path}" for path in APART if path not in self.paths]
        left_out += [f"--ignore={path}" for path in LEFT_OUT if self.paths == (UNITS,)]
        rest = ["--record", str(record), *left_out, *self.paths, *arguments]
        return [sys.executable, "-W", "ignore", *launch, *pytest, *rest]


def lanes(ranks: int) -> list[list[Stage]]:
    """Return the lanes that run at the same time, with stages of at most ``ranks`` ranks.

    Lanes share GPUs: processes take turns on one, and a collective waits until both of its ranks
    have their turn. The first two lanes begin with the runs that those of two GPUs are compared
    with.
    """
    found = [
        [Stage("cases on one GPU", 1, (CASES,))],
        [Stage("16-bit cases on one GPU", 1, (IN_16_BITS,), first=ranks - 1)],
        [Stage("unit tests on one GPU", 1, UNITS_OF_ONE, first=ranks - 1)],
        [Stage("attention, answers, waits and memory", 1, (*ON_ONE, WAITS))],
        [Stage("restarts", 1, (RESTARTS,))],
        [Stage("upstream's scripts", 1, (SCRIPTS,))],
        [Stage("state on one GPU", 1, (STATE,), first=ranks - 1)],
    ]
    if ranks == 2:
        found[-2].append(Stage("resumed cases on two GPUs", 2, (RESUMED,)))
        found[-1].append(Stage("state on two GPUs", 2, (STATE,)))
        found.append([Stage("cases on two GPUs", 2, (CASES,))])
        found.append([Stage("16-bit cases on two GPUs", 2, (IN_16_BITS,))])
        found.append([Stage("recurrent kernels and waits on two GPUs", 2, (KERNELS, WAITS))])
        ahead = Stage("cases that run ahead", 2, (AHEAD,))
        found.append([Stage("unit tests on two GPUs", 2, (UNITS,)), ahead])
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
        print(f"error: {sys.executable}: {lack}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    started = time.monotonic()
    facts = {"machine": machine(), "commit": _commit()}
    with tempfile.TemporaryDirectory(prefix="one-rank-runs-") as shared:
        ranks = 2 if own.shared else gpus
        environment = {"RANKS": str(ranks), "SHARED_GPU": str(int(ranks > gpus))}
        environment |= {"ONE_RANK_RUNS": shared}
        chosen = lanes(ranks)
        with ThreadPoolExecutor(len(chosen)) as pool:
            ended = [pool.submit(_run, lane, rest, gpus, environment) for lane in chosen]
            is_ended = False
            while not is_ended:
                is_ended = not wait(ended, WRITTEN_S).not_done
                cases = [case for stage in chain(*chosen) for case in _cases(stage, Path(shared))]
                seconds = round(time.monotonic() - started)
                if own.json:
                    write(own.json, {**facts, "seconds": seconds}, cases)
        for run in ended:
            run.result()
    wrong = [case for case in cases if case["outcome"] != "passed"]
    for case in wrong:
        reason = case.get("reason", "")
        print(f"{case['outcome']}: {case['stage']}: {case['test']} {reason}".rstrip())
    counts = f"{len(cases) - len(wrong)} of {len(cases)} cases passed"
    print(f"{counts} with {ranks} ranks on {gpus} GPUs in {seconds} s")
    return 1 if wrong or not cases or ending.is_set() else 0


def lacking(names: list[str]) -> str:
    """Import modules in a process of its own, as some start CUDA; return the error of the first one
    that cannot be imported, or nothing.
    """
    line = f"import os, {', '.join(names)}; os._exit(0)"
    command = [sys.executable, "-W", "ignore", "-c", line]
    environment = os.environ | {"PYTHONPATH": _search_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.stderr.strip().split("\n")[-1] if done.returncode else ""


def _search_path() -> str:
    """Python's search path of the lanes."""
    ours = [str(UNTUNED), str(CHECKOUT), str(REPOSITORY)]
    return os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")])


def write(path: Path, facts: dict, cases: list[dict]) -> None:
    """Write the JSON, a case a line, in the place of the one before."""
    head = json.dumps(facts)[:-1]
    lines = ",\n".join(map(json.dumps, cases))
    part = path.with_name(f"{path.name}.part")
    part.write_text(f'{head}, "cases": [\n{lines}\n]}}\n')
    part.replace(path)


def _run(lane: list[Stage], arguments: list[str], gpus: int, shared: dict[str, str]) -> None:
    """Run a lane's stages with variables that all stages share, and say how each has ended."""
    folder = Path(shared["ONE_RANK_RUNS"])
    for stage in lane:
        environment = os.environ | stage.environment(gpus) | WITHOUT_TF32 | shared
        environment |= {"PYTHONPATH": _search_path(), "CHECKOUT": str(CHECKOUT)}
        environment |= {"OMP_NUM_THREADS": "2"}
        if ending.is_set():
            break
        log, record = folder / f"{stage.name}.log", _record(stage, folder)
        with log.open("w") as file:
            code = _ended(stage.command(record, arguments), environment, file)
        if arguments and record.exists() and '"collected": []' in record.read_text():
            continue  # pytest's -k has chosen cases of other stages
        codes[stage] = code
        cases = _cases(stage, folder)
        if any(case["outcome"] != "passed" for case in cases):
            print(f"\n===== {stage.name}\n{log.read_text(errors='replace')}", flush=True)
        else:
            print(f"===== {stage.name}: {len(cases)} passed", flush=True)


def _record(stage: Stage, folder: Path) -> Path:
    """The file to which a stage's pytest adds each case as it ends."""
    return folder / f"{stage.name}.jsonl"


codes: dict[Stage, int] = {}
"""Exit codes of the stages that have ended."""

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


def _cases(stage: Stage, folder: Path) -> list[dict]:
    """The outcomes of a stage's cases so far; before a case has ended, "missing".

    A unit test that is skipped because it is for CPU ranks only is no case.
    """
    record, code = _record(stage, folder), codes.get(stage)
    lines = record.read_text().split("\n")[:-1] if record.exists() else []
    records = [json.loads(line) for line in lines]
    collected = next((line["collected"] for line in records if "collected" in line), [])
    ended = {line["test"]: line for line in records if "test" in line}
    cases = []
    for test in collected:
        case = ended.get(test, {"test": test, "outcome": "missing"})
        if not (case["outcome"] == "skipped" and test.startswith(UNITS)):
            cases.append({"stage": stage.name, **case})
    has_failed = any(case["outcome"] != "passed" for case in cases)
    if code is not None and (not collected or (code != 0 and not has_failed)):
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
