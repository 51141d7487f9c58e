# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The convolution on kernels that know no halo equals one of all ranks' tokens.

The kernels themselves need a GPU; here the reference stands in for them, and sees no halo either.
"""

import importlib
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.ssm import state_passing
from megatron.core.ssm.ops.reference import causal_conv1d_fn
from megatron.core.token_layout import PaddedLengths, contiguous_layout, zigzag_layout
from megatron.core.token_layout.recurrence_plan import plan_recurrence
from tests.unit_tests.test_utilities import Utils, requires_world_size

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
    # No other test may meet the module that has the stand-ins.
    del sys.modules[name], state_passing.kernel_conv


@requires_world_size(4)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("beside", [0, 8, 3], ids=["contiguous", "a-view", "a-view-not-aligned"])
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((40,), id="one-sample"),
        pytest.param((11, 1, 1, 27), id="boundaries-in-the-window"),
        pytest.param((9, 2, 29), id="halo-of-one-token"),
        pytest.param((10, 20, 10), id="boundaries-between-ranks"),
        pytest.param((10, 10, 10, 10), id="every-sample-on-one-rank"),
        pytest.param((2, 3, 3), id="shards-below-the-window"),
        pytest.param((4,), id="one-token-a-rank"),
        pytest.param((40,), id="zigzag"),
        pytest.param((24, 24, 24), id="zigzag-samples"),
        pytest.param((8, 8), id="zigzag-one-token-a-link"),
    ],
)
def test_equals_a_convolution_of_the_whole(kernel_conv, request, lengths, beside, with_bias):
    Utils.initialize_distributed()
    torch.manual_seed(1)
    lengths, rank = PaddedLengths(lengths, lengths), dist.get_rank()
    is_zigzag = "zigzag" in request.node.callspec.id
    sharded = plan_recurrence(lengths, 4, rank, Utils.device, is_zigzag)
    whole = plan_recurrence(lengths, 1, 0, Utils.device)
    rows = 2 if len(lengths.padded) == 1 else 1
    x, seed = (torch.randn(rows, lengths.total, CHANNELS).to(Utils.device) for _ in range(2))
    weight, bias = torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS) if with_bias else None
    of_layer = [t.to(Utils.device).requires_grad_() for t in (weight, bias) if t is not None]
    weight, bias = (*of_layer, None)[:2]

    layout = zigzag_layout if is_zigzag else contiguous_layout
    own = layout(lengths, 4).tokens[rank].to(Utils.device)
    shard = F.pad(x[:, own], (0, beside)).requires_grad_()
    given, x = sharded.by_link(shard)[..., :CHANNELS], x.requires_grad_()
    out = kernel_conv.HaloConv.apply(given, weight, bias, sharded, dist.group.WORLD)
    expected = causal_conv1d_fn(
        x.transpose(1, 2), weight, bias, whole.seq_idx, activation="silu"
    ).transpose(1, 2)
    out_grad = sharded.by_link(seed[:, own])
    kept = out_grad.clone()
    found = torch.autograd.grad(out, [shard, *of_layer], out_grad)
    wanted = torch.autograd.grad(expected, [x, *of_layer], seed)
    for of_rank in found[1:]:
        dist.all_reduce(of_rank)
    torch.testing.assert_close(sharded.whole(out), expected[:, own])
    torch.testing.assert_close(out_grad, kept, rtol=0, atol=0)
    wanted = (F.pad(wanted[0][:, own], (0, beside)), *wanted[1:])
    torch.testing.assert_close(found, wanted)
