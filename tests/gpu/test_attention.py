# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""flash-attn-4 against PyTorch's attention in fp32, at the sizes of real images."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.transformer import packed_flash_attention as flash
from tests.unit_tests.test_utilities import requires_world_size

HEADS, CHANNELS = 16, 80
LENGTHS = {
    "photos, a screen and a page": (1210, 1180, 3610, 8170),
    "frames of clips": (1034,) * 6,
    "shorter than a block": (11, 26, 74, 1, 130),
    "many": (32,) * 400,
}
TOLERANCE = 0.01
"""An error may be this share of a tensor's norm; bf16 inputs and probabilities round by 0.004."""


@requires_world_size(1)
@pytest.mark.parametrize("sharp", [1.0, 3.0])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_outputs_and_gradients_equal_those_in_fp32(lengths, sharp, record_property):
    """In memory full of NaN, as kernels add to memory that must be cleared before."""
    chosen = LENGTHS[lengths]
    torch.cuda.empty_cache()
    not_zero = torch.full((1 << 28,), math.nan, device="cuda")
    del not_zero
    generator = torch.Generator("cuda").manual_seed(1)
    mixed, grad = (
        torch.randn(sum(chosen), HEADS, width, generator=generator, device="cuda").bfloat16()
        for width in (3 * CHANNELS, CHANNELS)
    )
    # Channels of real activations have means of their own, which random ones lack.
    inputs = (mixed * sharp + torch.linspace(-1, 1, 3 * CHANNELS, device="cuda")).bfloat16()
    bounds = torch.tensor([0, *chosen]).cumsum(0).int().cuda()
    query, key, value = (part.requires_grad_() for part in inputs.detach().split(CHANNELS, -1))
    output = flash.packed_attention(query, key, value, bounds, max(chosen))
    found = [output, *torch.autograd.grad(output, (query, key, value), grad)]
    assert len({each.untyped_storage().data_ptr() for each in found[1:]}) == 1  # split is free
    parts = zip(*(t.split(chosen) for t in (query, key, value, grad)), strict=True)
    right = map(torch.cat, zip(*(_in_fp32(*part) for part in parts), strict=True))
    worst = 0.0
    for one, other in zip(found, right, strict=True):
        worst = max(worst, float((one - other).norm() / other.norm()))
    record_property("found", worst)
    assert worst <= TOLERANCE


def _in_fp32(query, key, value, grad) -> list[torch.Tensor]:
    """Return the output of one sequence and the gradients of its inputs, [tokens, heads, C]."""
    heads = [
        [t.transpose(0, 1)[h : h + 4].float() for t in (query, key, value, grad)]
        for h in range(0, HEADS, 4)
    ]
    found = []
    for *inputs, of_output in heads:
        inputs = [each.detach().requires_grad_() for each in inputs]
        with sdpa_kernel(SDPBackend.MATH):
            output = F.scaled_dot_product_attention(*inputs)
        found.append([output.detach(), *torch.autograd.grad(output, inputs, of_output)])
    return [torch.cat(parts).transpose(0, 1) for parts in zip(*found, strict=True)]


@requires_world_size(1)
def test_gradients_of_many_sequences_have_the_same_bits_each_time():
    """Gradients of keys and values; the kernel adds up the gradient of queries in any order."""
    count, length = 400, 32
    generator = torch.Generator("cuda").manual_seed(1)
    drawn = torch.randn(count * length, 2, 4 * CHANNELS, generator=generator, device="cuda")
    *inputs, grad = drawn.bfloat16().split(CHANNELS, dim=-1)
    bounds = torch.arange(0, count * length + 1, length, dtype=torch.int32, device="cuda")
    inputs = [each.detach().requires_grad_() for each in inputs]
    output = flash.packed_attention(*inputs, bounds, length)
    found = [torch.autograd.grad(output, inputs, grad, retain_graph=True) for _ in range(200)]
    assert all(torch.equal(each[1], found[0][1]) for each in found)
    assert all(torch.equal(each[2], found[0][2]) for each in found)


@requires_world_size(1)
def test_a_kernel_that_is_wrong_is_refused(monkeypatch):
    """By flash-attn-4's own backward, gradients of queries are wrong for heads of 80 on Hopper."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("it is right on other GPUs")
    from flash_attn.cute import interface

    flash.check_kernel(2, CHANNELS, torch.bfloat16)
    monkeypatch.setattr(flash, "_backward", lambda: interface._flash_attn_bwd)
    with pytest.raises(ValueError, match="the error of dq is"):
        flash.check_kernel(2, CHANNELS, torch.bfloat16)


@requires_world_size(1)
@pytest.mark.parametrize("channels", [8, 48, 72, 96, 120, 128])
def test_heads_of_other_widths(channels):
    flash.check_kernel(2, channels, torch.bfloat16)


@requires_world_size(1)
def test_another_type():
    flash.check_kernel(2, CHANNELS, torch.float16)
