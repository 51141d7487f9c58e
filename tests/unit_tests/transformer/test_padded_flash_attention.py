# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Heads that flash-attn-4 takes; `tests/gpu/test_attention.py` has its kernels."""

import torch
import torch.nn.functional as F

from megatron.core.transformer.padded_flash_attention import wide_heads


def test_wide_heads_are_those_of_megatron_with_zeros():
    """Megatron splits each head's channels into a query, a key and a value."""
    heads, channels, zeros = 4, 40, 24
    mixed = torch.randn(7, 1, heads * 3 * channels, requires_grad=True)
    grads = torch.randn(3, 7, 1, heads, channels + zeros)
    found = wide_heads(mixed, channels)
    parts = mixed.view(7, 1, heads, 3 * channels).split(channels, -1)
    expected = [F.pad(part, (0, zeros)) for part in parts]
    assert all(map(torch.equal, found, expected))
    of_found, of_expected = (
        torch.autograd.grad(each, mixed, grads.unbind()) for each in (found, expected)
    )
    assert torch.equal(*of_found, *of_expected)
