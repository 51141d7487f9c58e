# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The program's main file, before it imports Megatron, and how it ends."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistBackendError, rendezvous
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from examples.mimo.common import errors
from examples.mimo.common.errors import UserError, end_rank
from examples.mimo.common.launch import launch
from examples.mimo.nemotron_vlm.options.environment import at_start
from examples.mimo.pretrain_nemotron_vlm import ALONE, GPU_KERNELS, ROOT


@pytest.mark.parametrize(
    ("line", "uses"),
    [
        ("--device cuda --bf16", True),
        ("", False),
        ("--device cpu", False),
        ("--dry-run --device cuda", False),
        ("--plan 64 --device=cuda", False),
    ],
)
def test_only_training_on_gpus_sees_them(line, uses):
    assert at_start(line.split())[0] is uses


def test_a_process_alone_waits_for_no_store_of_an_agent(monkeypatch):
    """The converter's ``verify`` under `tests.ranks`."""
    for name, value in ({"TORCHELASTIC_USE_AGENT_STORE": "True"} | ALONE).items():
        monkeypatch.setenv(name, value)
    assert next(rendezvous("env://", timeout=timedelta(seconds=1)))[1:] == (0, 1)


CONNECTIONS, LOADING = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"

STARTS = [
    ("", {CONNECTIONS: "1"}),
    ("--language pp=2 --cuda-graph-impl local", {CONNECTIONS: "8", LOADING: "EAGER"}),
    ("--language=pp=2,cp=2 --cuda-graph-impl=local", {CONNECTIONS: "1", LOADING: "EAGER"}),
    ("--cuda-graph-impl local", {CONNECTIONS: "8", LOADING: "EAGER"}),
    ("--cuda-graph-impl local --language planned", {CONNECTIONS: "1", LOADING: "EAGER"}),
]
"""Command lines, and the variables that CUDA has to find when it starts."""


def _started(tmp_path, line, **environment):
    """The environment in which the program imports the first library that reads it."""
    noted = "import json, os\nprint(json.dumps(dict(os.environ)))\nos._exit(0)\n"
    for name in ("torch", "triton", "transformer_engine"):
        (tmp_path / f"{name}.py").write_text(noted)
    unset = {CONNECTIONS, LOADING, "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "NVTE_FRAMEWORK"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, ROOT / "examples/mimo/pretrain_nemotron_vlm.py", *line.split()],
        capture_output=True,
        text=True,
        env=kept | {"PYTHONPATH": str(tmp_path)} | environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class TestEnvironment:
    @pytest.mark.parametrize(("line", "expected"), STARTS)
    def test_is_set_before_a_library_that_reads_it_is_imported(self, tmp_path, line, expected):
        found = _started(tmp_path, f"--device cuda {line}")
        assert {n: found[n] for n in (CONNECTIONS, LOADING) if n in found} == expected
        assert found["NVTE_FRAMEWORK"] == "pytorch" and found["TRITON_CACHE_AUTOTUNING"] == "1"

    def test_keeps_what_the_user_has_set_and_kernels_of_hosts_apart(self, tmp_path):
        """On a network file system, a file that another host replaces cannot be read on."""
        given = {CONNECTIONS: "32", "TRITON_CACHE_DIR": "/kernels"}
        found = _started(tmp_path, "--device cuda", **given)
        assert {name: found[name] for name in given} == given
        assert Path(found["TORCHINDUCTOR_CACHE_DIR"]).parent.name == os.uname().nodename
        found = _started(tmp_path, "")
        assert Path(found["TRITON_CACHE_DIR"]).parent.name == os.uname().nodename


def test_cpu_ranks_leave_installed_gpu_kernels_alone(tmp_path):
    for name in GPU_KERNELS:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('needs a GPU')")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    program = ROOT / "examples" / "mimo" / "pretrain_nemotron_vlm.py"
    done = subprocess.run(
        [sys.executable, program, "--device", "cpu", "--model", "tiny", "--dry-run", "1"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


LOST = "[/pytorch/third_party/gloo/x.cc:5] Connection closed by peer [127.0.0.1]:5. Look at it."


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("bad data", rank=1), 2, "rank 1: bad data"),
        (UserError("bad layout"), 2, ""),  # the first rank prints it
        (RuntimeError(LOST), 1, "rank 1 has lost another rank, which has ended or hangs: Conn"),
        (DistBackendError("NCCL: a remote process exited"), 1, "rank 1 has lost another rank, "),
        (DistBackendError("Duplicate GPU"), 1, "rank 1: DistBackendError: Duplicate GPU"),
        (ValueError("found\nNaN"), 1, "rank 1: ValueError: found NaN"),
    ],
)
def test_an_error_is_one_line_that_torchruns_report_repeats(
    error, code, line, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(errors, "GRACE_S", 0)
    assert end_rank(error) == code
    said = capsys.readouterr().err.splitlines()
    assert len(said) == bool(line) or f"{type(error).__name__}: " in said[-1]
    assert not line or said[-1].startswith(f"error: {line}")
    failure = ProcessFailure(0, 1, code, str(tmp_path / "error.json"))
    last = ChildFailedError("main", {1: failure}).format_msg().splitlines()[-2]
    assert last.startswith("  traceback : error: ")
    assert last.endswith(said[-1] if said else "layout")


def test_a_process_inside_a_launched_rank_reports_its_own_error(monkeypatch, capsys):
    """It inherits the launcher's variable, but torchrun has not started it."""
    for name in list(os.environ):
        if name.startswith("TORCHELASTIC_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(errors.LAUNCHED, "1")
    assert end_rank(UserError("no such option")) == 2
    assert capsys.readouterr().err == "error: no such option\n"


RANKS = {
    "refuse": ("raise UserError('no such option')", 2, "error: no such option", 1),
    "read": ("rank == 1 and fail(UserError('no data', 1))", 2, "error: rank 1: no data", 1),
    "read twice": ("rank == 1 and fail(UserError('no data', 1))", 2, "error: rank 1: no data", 2),
    "reject": ("sys.exit(17)", 17, f"error: {errors.NOT_FINITE}", 1),
    "raise": ("rank == 1 and 1 / 0", 1, "error: rank 1: ZeroDivisionError: division by zero", 2),
    "kill": ("rank == 1 and os.kill(os.getpid(), 9)", 137, "error: rank 1 ended with SIGKILL", 1),
}
"""Code that ranks run, the exit code that the launcher ends with, its last line, and how often
stderr has it: once for each attempt, and an error that is none of the user's has it below its
traceback, too."""


@pytest.mark.parametrize("does", RANKS)
def test_launched_ranks_end_with_the_line_of_the_one_that_failed_first(
    does, tmp_path, capfd, monkeypatch
):
    """The others wait: torchrun ends them."""
    text, code, line, times = RANKS[does]
    monkeypatch.setenv(errors.LAUNCHED, "")  # and back at the end
    ranks = tmp_path / "ranks.py"
    ranks.write_text(
        "import os, sys, time\n"
        "from examples.mimo.common.errors import UserError, end_rank\n"
        "rank = int(os.environ['RANK'])\n"
        "def fail(error):\n    raise error\n"
        f"try:\n    {text}\n"
        "except (Exception, SystemExit) as error:\n    sys.exit(end_rank(error))\n"
        "time.sleep(60)\n"
    )
    restarts = ("--max-restarts", "1") if "twice" in does else ()
    assert launch(["--standalone", "--nproc-per-node", "2", *restarts, str(ranks)]) == code
    said = capfd.readouterr().err.splitlines()
    assert said[-1] == line and said.count(line) == times
    assert not any("ChildFailedError" in each for each in said)
