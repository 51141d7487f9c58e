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
from examples.mimo.pretrain_nemotron_vlm import ALONE, GPU_KERNELS, ROOT, at_start


def test_a_process_alone_waits_for_no_store_of_an_agent(monkeypatch):
    """The converter's ``verify`` under `tests.ranks`."""
    for name, value in ({"TORCHELASTIC_USE_AGENT_STORE": "True"} | ALONE).items():
        monkeypatch.setenv(name, value)
    assert next(rendezvous("env://", timeout=timedelta(seconds=1)))[1:] == (0, 1)


CONNECTIONS, LOADING = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"
GRAPHS = "--device=cuda --cuda-graph-impl"


@pytest.mark.parametrize(
    ("line", "uses_gpus", "connections", "loading"),
    [
        ("--device cuda --bf16", True, "1", None),
        ("", False, "1", None),
        ("--dry-run --device cuda", False, "1", None),
        (f"{GRAPHS} local --language pp=2", True, "8", "EAGER"),
        (f"{GRAPHS}=local --language=pp=2,cp=2", True, "1", "EAGER"),
        ("--config run.yaml", True, "8", "EAGER"),
        ("--config run.yaml --device cpu", False, "8", "EAGER"),
    ],
)
def test_only_training_on_gpus_sees_them_and_graphs_have_variables_of_their_own(
    line, uses_gpus, connections, loading, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("device: cuda\ncuda_graph_impl: local\n")
    monkeypatch.delenv(CONNECTIONS)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    uses, variables = at_start(line.split())
    assert uses is uses_gpus
    assert variables.get("NCCL_GRAPH_REGISTER") == ("0" if loading else None)
    assert (variables[CONNECTIONS], variables.get(LOADING)) == (connections, loading)


def started(words: str, environment: dict[str, str]) -> str:
    """Run the program to its good end; return its output."""
    command = [sys.executable, ROOT / "examples/mimo/pretrain_nemotron_vlm.py", *words.split()]
    given = {"capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, env=environment, **given)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_environment_is_set_before_a_library_that_reads_it_is_imported(tmp_path):
    """The program keeps variables that the user has set. Each host has its own kernels: on a
    network file system, a file that another host replaces cannot be read on."""
    noted = "import json, os\nprint(json.dumps(dict(os.environ)))\nos._exit(0)\n"
    for name in ("torch", "triton", "transformer_engine"):
        (tmp_path / f"{name}.py").write_text(noted)
    unset = {LOADING, "TORCHINDUCTOR_CACHE_DIR", "NVTE_FRAMEWORK"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    given = {CONNECTIONS: "32", "TRITON_CACHE_DIR": "/kernels"}
    said = started(f"{GRAPHS} local", kept | {"PYTHONPATH": str(tmp_path)} | given)
    found = json.loads(said)
    assert {name: found[name] for name in given} == given
    assert (found[LOADING], found["NVTE_FRAMEWORK"]) == ("EAGER", "pytorch")
    assert found["TRITON_CACHE_AUTOTUNING"] == "1"
    assert Path(found["TORCHINDUCTOR_CACHE_DIR"]).parent.name == os.uname().nodename


def test_cpu_ranks_leave_installed_gpu_kernels_alone(tmp_path):
    for name in GPU_KERNELS:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('needs a GPU')")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    started("--device cpu --model tiny --dry-run 1", os.environ | {"PYTHONPATH": path})


LOST = "[/pytorch/third_party/gloo/x.cc:5] Connection closed by peer [127.0.0.1]:5. Look at it."


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("bad data", rank=1), 2, "rank 1: bad data"),
        (UserError("bad layout"), 2, ""),  # the first rank prints it
        (RuntimeError(LOST), 1, "rank 1 has lost another rank, which has ended or hangs: Conn"),
        (DistBackendError("Duplicate GPU"), 1, "rank 1: DistBackendError: Duplicate GPU"),
    ],
)
def test_an_error_is_one_line_that_torchruns_report_repeats(
    error, code, line, tmp_path, monkeypatch, capsys
):
    """Also the error of a process that a launched rank starts, and torchrun does not."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(errors.NOTED, "1")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
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


RANKS = {
    "read twice": ("rank == 1 and fail(UserError('no data', 1))", 2, "error: rank 1: no data", 2),
    "reject": ("sys.exit(17)", 17, f"error: {errors.NOT_FINITE}", 1),
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
    monkeypatch.setenv(errors.NOTED, "")  # and back at the end
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
