# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The CPU runtime: what it redirects and what it refuses.

Every other test of several ranks runs under it; tests/e2e runs upstream's own scripts.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.cpu_runtime.collectives import _devices_of
from megatron.core.tensor_parallel import random
from tests.unit_tests.test_utilities import (
    COLLECTIVE_TIMEOUT,
    HAVE_CUDA,
    Utils,
    requires_world_size,
)

pytestmark = pytest.mark.skipif(HAVE_CUDA, reason="this run uses its GPUs")


@pytest.mark.parametrize("device", ["cuda:3", 0])
def test_a_cuda_device_means_the_cpu(device):
    x = torch.ones(2)
    made = [torch.empty(2, device=device), torch.tensor([1.0], device=device)]
    made += [x.new_full((3,), 1.0, device=device), torch.zeros_like(x, device=device)]
    made += [x.to(device, torch.float64), x.cuda(device)]
    assert {each.device for each in made} == {torch.device("cpu")}


def test_autocast_for_cuda_casts_on_the_cpu():
    x = torch.ones(2, 2)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cuda")
        assert (x @ x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: torch.cuda.CUDAGraph(), r"torch\.cuda\.CUDAGraph .*cuda_api\.py"),
        (lambda: torch.cuda.memory_stats()["num_alloc_retries"], "num_alloc_retries"),
        (lambda: torch.UntypedStorage(4, device="cuda"), "torch.cuda._lazy_init"),
    ],
)
def test_what_is_unknown_is_named(call, name):
    with pytest.raises(NotImplementedError, match=name):
        call()


def test_no_public_function_is_left_to_cuda():
    left = [
        name
        for name, value in vars(torch.cuda).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "") == "torch.cuda"
        and not isinstance(value, type)
    ]
    assert left == []


def test_the_current_device_and_stream_are_those_entered():
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
    side = torch.cuda.Stream()
    with torch.cuda.device(3), torch.cuda.stream(side):
        assert torch.cuda.current_device() == 3
        assert torch.cuda.current_stream() is side
    assert torch.cuda.current_device() == device
    assert torch.cuda.current_stream() is stream


def test_the_profiler_runs_without_cuda_events(capfd):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):
        torch.ones(2) + 1
    assert "Failed to record CUDA event" not in capfd.readouterr().err


def test_optimizers_step_where_pytorch_is_built_for_cuda(monkeypatch):
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.Adam([weight], lr=0.5).step()
    assert weight.item() == pytest.approx(0.5)


def test_a_fork_draws_from_its_own_stream(caplog):
    def draws(of_default: int) -> list[torch.Tensor]:
        random.model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0)
        torch.rand(of_default)
        state, drawn = torch.cuda.get_rng_state(), []
        for _ in range(2):
            with random.get_cuda_rng_tracker().fork():
                drawn.append(torch.rand(4))
        assert torch.equal(torch.cuda.get_rng_state(), state)
        return drawn

    first = draws(0)
    with torch.random.fork_rng(device_type="cuda"):
        assert all(map(torch.equal, draws(1), first)) and not torch.equal(*first)
    assert caplog.records == []


def test_loading_data_leaves_the_default_stream_and_each_epoch_is_shuffled_anew():
    loader = torch.utils.data.DataLoader(range(64), shuffle=True)
    before = torch.cuda.get_rng_state()
    first, second = ([int(batch) for batch in loader] for _ in range(2))
    assert first != second and sorted(first) == sorted(second) == list(range(64))
    assert torch.equal(torch.cuda.get_rng_state(), before)


INSTALLING = """
import sys, torch; before = dict(vars(torch.cuda))
to, empty = torch.Tensor.to, torch.empty
import megatron.core, megatron.core.pipeline_parallel, megatron.core.models.gpt
from megatron.core.tensor_parallel import mappings, random
from megatron.core import jit
assert not any('cpu_runtime' in name for name in sys.modules)
from megatron.core.cpu_runtime import install
assert all(getattr(torch.cuda, name) is old for name, old in before.items())
assert torch.Tensor.to is to and torch.empty is empty
unused, torch.cuda.is_initialized = torch.cuda.is_initialized, lambda: True
try: install()
except RuntimeError as error: assert 'after CUDA had been initialised' in str(error)
else: raise AssertionError('not refused')
torch.cuda.is_initialized = unused
device, compiled = torch.cuda.device, torch.compile
install(); installed = torch.Tensor.to, torch.compile; install()
assert installed == (torch.Tensor.to, torch.compile)
assert torch.compile(print) is torch.compile(dynamic=True)(print) is print
assert device is not torch.cuda.device and compiled is not torch.compile
assert random.device_ctx_manager is torch.cuda.device
assert jit.jit_fuser is torch.compile
"""


LATER = """
import torch
torch.compile = lambda function=None, **_: function or torch.compile  # as the program does
from megatron.core import cpu_runtime
cpu_runtime.install()
from torch.nn.attention.bias import causal_lower_right
"""


@pytest.mark.parametrize("program", [INSTALLING, LATER])
def test_installing_works_before_and_after_imports(program):
    """It changes nothing before, is refused over a used GPU, and rebinds functions that were
    imported before. PyTorch's compiler, imported later, refuses functions that have two of its
    rules by two names."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_gloo_takes_the_interface_that_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere")
    with pytest.raises(RuntimeError, match="Unable to find address for: nowhere"):
        _devices_of(-1)  # of no process: it is made anew


@requires_world_size(2)
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", None])
def test_nccl_means_gloo(backend):
    """A group has the world's time limit, and shares the thread that serves it."""
    Utils.destroy()  # the program's runs have a limit of their own
    Utils.initialize_distributed()
    group = dist.new_group([0, 1], backend=backend, device_id=torch.device("cuda", 0))
    dist.barrier(group, device_ids=[0])
    assert dist.get_backend(group) == "gloo"
    gloo = group._get_backend(torch.device("cpu"))
    assert isinstance(gloo, dist.ProcessGroupGloo)
    assert gloo.options._timeout == COLLECTIVE_TIMEOUT
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert threads.count("gloo_tcp_loop\n") == 1


@requires_world_size(4)
def test_a_group_may_be_left_as_soon_as_it_is_made():
    Utils.initialize_distributed()
    for _ in range(100):  # without the barrier in new_group, about one of 100 rounds fails
        pairs = dist.new_group([0, 2]), dist.new_group([1, 3])
        dist.destroy_process_group(pairs[Utils.rank % 2])
