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

CASES = "tests/gpu"
RESTARTS, SCRIPTS = "tests/gpu/test_restarts.py", "tests/gpu/test_upstream_scripts.py"
KERNELS, WAITS = "tests/gpu/test_recurrence.py", "tests/gpu/test_host_waits.py"
STATE, ROWS = "tests/gpu/test_state.py", "tests/gpu/test_rows.py"
AHEAD = f"{ROWS}::test_two_gpus_run_ahead"
IN_16_BITS, RESUMED = f"{ROWS}::TestIn16Bits", f"{ROWS}::TestResumed"
ON_ONE = tuple(f"tests/gpu/test_{name}.py" for name in ("answers", "attention", "soak"))
APART = (RESTARTS, SCRIPTS, AHEAD, IN_16_BITS, RESUMED, KERNELS, WAITS, STATE, *ON_ONE)
"""Stages of `CASES` leave these out, because other stages take them."""

UNITS, PROGRAM = "tests/unit_tests", "tests/unit_tests/examples/nemotron_vlm"
LEFT_OUT = (f"{UNITS}/ssm", f"{PROGRAM}/energon")
LEFT_OUT += (f"{PROGRAM}/loop/test_rows.py", f"{PROGRAM}/loop/test_saves.py")
"""Two GPUs leave these unit tests out. Triton compiles recurrent layers anew for each length
(`test_recurrence.py` has fewer), and the others are rows of CPU ranks, or prove the same there."""

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

    def record(self, folder: Path) -> Path:
        """Return the file to which pytest adds each case as it ends."""
        return folder / f"{self.name}.jsonl"

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
    have their turn. The first two lanes begin with the runs on one GPU, with which the runs on
    two are compared.
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
        print(f"error: {sys.executable} cannot import {lack}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    started = time.monotonic()
    facts = {"machine": machine(), "commit": _commit()}
    with tempfile.TemporaryDirectory(prefix="one-rank-runs-") as shared:
        ranks = 2 if own.shared else gpus
        environment = {"RANKS": str(ranks), "SHARED_GPU": str(int(ranks > gpus))}
        environment |= {"ONE_RANK_RUNS": shared, "PYTHONPATH": _search_path()}
        environment |= {"CHECKOUT": str(CHECKOUT), "OMP_NUM_THREADS": "2"}
        # cuBLAS, cuDNN and Triton then keep all digits of fp32 products.
        environment |= {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
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
    """Replace the JSON; each case has a line."""
    head = json.dumps(facts)[:-1]
    lines = ",\n".join(map(json.dumps, cases))
    part = path.with_name(f"{path.name}.part")
    part.write_text(f'{head}, "cases": [\n{lines}\n]}}\n')
    part.replace(path)


def _run(lane: list[Stage], arguments: list[str], gpus: int, shared: dict[str, str]) -> None:
    """Run a lane's stages with variables that all stages share, and say how each has ended."""
    folder = Path(shared["ONE_RANK_RUNS"])
    for stage in lane:
        environment = os.environ | stage.environment(gpus) | shared
        if ending.is_set():
            break
        log, record = folder / f"{stage.name}.log", stage.record(folder)
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
    record, code = stage.record(folder), codes.get(stage)
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
