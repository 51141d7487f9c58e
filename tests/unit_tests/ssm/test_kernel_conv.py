# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The first tokens' convolution, mended beside the kernels, equals one that knows the halo.

The kernels themselves need a GPU; here the reference stands in for them, and sees no halo either.
"""

import importlib
import sys
from types import ModuleType

import pytest
import torch

from megatron.core.context_parallel_layout import PaddedLengths, RecurrencePlan
from megatron.core.ssm import state_passing
from megatron.core.ssm.ops.reference import causal_conv1d_fn

CHANNELS, WIDTH = 8, 4


def forward_kernel(x, weight, bias, seq_idx, *_):
    return causal_conv1d_fn(x, weight, bias, seq_idx, activation="silu")


def backward_kernel(x, weight, bias, grad, seq_idx, _initial, _final, x_grad, *_):
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    with torch.enable_grad():
        out = causal_conv1d_fn(*leaves, seq_idx=seq_idx, activation="silu")
    found = [*torch.autograd.grad(out, leaves, grad), None]
    if x_grad is not None:
        found[0] = x_grad.copy_(found[0])
    return found[0], found[1], found[2], None


@pytest.fixture
def kernel_conv(monkeypatch):
    functions = ModuleType("causal_conv1d.cpp_functions")
    functions.causal_conv1d_fwd_function = forward_kernel
    functions.causal_conv1d_bwd_function = backward_kernel
    monkeypatch.setitem(sys.modules, "causal_conv1d", ModuleType("causal_conv1d"))
    monkeypatch.setitem(sys.modules, "causal_conv1d.cpp_functions", functions)
    name = "megatron.core.ssm.state_passing.kernel_conv"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    # Nobody else may meet the module that has the stand-ins.
    del sys.modules[name], state_passing.kernel_conv


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(
    ("lengths", "cp", "rank"),
    [
        pytest.param((40,), 4, 1, id="within-a-sample"),
        pytest.param((40,), 4, 0, id="first-rank"),
        pytest.param((11, 1, 1, 27), 4, 1, id="boundaries-in-the-window"),
        pytest.param((9, 2, 29), 4, 1, id="halo-of-one-token"),
        pytest.param((2, 3, 3), 4, 2, id="shard-below-the-window"),
        pytest.param((8,), 8, 3, id="one-token-a-rank"),
    ],
)
def test_equals_a_convolution_that_knows_the_halo(kernel_conv, lengths, cp, rank, with_bias):
    torch.manual_seed(1)
    plan = RecurrencePlan(PaddedLengths(lengths, lengths), cp, rank, torch.device("cpu"))
    halo = plan.halo(WIDTH - 1)
    shapes = [(1, plan.shard_size, CHANNELS), (1, WIDTH - 1, CHANNELS), (CHANNELS, WIDTH)]
    x, past, weight = (torch.randn(shape) for shape in shapes)
    past = past * halo.valid[:, None]
    bias = torch.randn(CHANNELS) if with_bias else None
    inputs = [t.requires_grad_() for t in (x, past, weight, bias) if t is not None]

    out = kernel_conv.HaloConv.apply(x, past, weight, bias, plan)
    expected = causal_conv1d_fn(
        x.transpose(1, 2),
        weight,
        bias,
        plan.seq_idx,
        initial_states=past.transpose(1, 2),
        activation="silu",
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected)

    seed = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, seed)
    wanted = list(torch.autograd.grad(expected, inputs, seed))
    if not plan.continues[rank]:
        wanted[1] = torch.zeros_like(past)  # of no meaning: nothing comes before
    for gradient, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, reference)
