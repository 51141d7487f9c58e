# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of packed sequences by flash-attn-4, in heads of a width that it computes right.

On Hopper, its backward (4.0.0b36) writes the gradient of queries as heads of a multiple of 16
channels, and reads it as heads of a multiple of 32. So heads of 80 get wrong gradients, without a
warning. Zeros fill heads up to such a multiple here: they change neither scores nor outputs.
"""

import warnings
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

WIDTH = 32
"""Heads are padded to a multiple of so many channels."""

SEVERAL_BLOCKS = 512
"""Tokens that no block of the kernels holds. They are compiled anew, for seconds in the midst of
training, where the longest sequence fits into one block."""

LENGTHS, NEAR = (203, 64, 1), 0.02
"""Lengths of the sequences that `check_kernel` compares, and the relative error that it allows;
16-bit numbers come to 0.003, wrong gradients to more than 1."""


def is_installed() -> bool:
    """Return whether flash-attn-4 is there; other versions of flash-attn have no such module."""
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


class _Padded(torch.autograd.Function):
    """Fill heads up with zeros."""

    @staticmethod
    def forward(ctx, heads: Tensor, width: int) -> Tensor:
        ctx.channels = heads.size(-1)
        return _filled(heads, width)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad[..., : ctx.channels], None


class _Cut(torch.autograd.Function):
    """Take the first channels of heads."""

    @staticmethod
    def forward(ctx, heads: Tensor, channels: int) -> Tensor:
        ctx.width = heads.size(-1)
        return heads[..., :channels].contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _filled(grad, ctx.width), None


def _filled(heads: Tensor, width: int) -> Tensor:
    filled = heads.new_empty(*heads.shape[:-1], width)
    filled[..., : heads.size(-1)] = heads
    filled[..., heads.size(-1) :] = 0
    return filled


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int
) -> Tensor:
    """Let the tokens of each packed sequence attend to all tokens of the same one.

    Args:
        query, key, value: [tokens, heads, channels], in 16 bits.
        bounds: int32 [sequences + 1], where each sequence begins, and the end of the last.
        longest: tokens of the longest sequence.

    Returns:
        [tokens, heads, channels].
    """
    from flash_attn.cute import flash_attn_varlen_func  # starts a compiler

    channels = query.size(-1)
    width = -(-channels // WIDTH) * WIDTH
    heads = (_Padded.apply(each, width) for each in (query, key, value))
    packed = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    bound = max(longest, SEVERAL_BLOCKS)
    packed |= {"max_seqlen_q": bound, "max_seqlen_k": bound}
    attended, _ = flash_attn_varlen_func(*heads, softmax_scale=channels**-0.5, **packed)
    return _Cut.apply(attended, channels)


def check_kernel(heads: int, channels: int, dtype: torch.dtype) -> None:
    """Compare outputs and gradients with attention in fp64 on three short sequences.

    Raises:
        ValueError: an error is too large; the message has it.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (4, sum(LENGTHS), heads, channels)
    drawn = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    bounds = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
    *inputs, grad = drawn.unbind()
    with warnings.catch_warnings():  # the compiler's own, of arguments that it leaves out
        warnings.simplefilter("ignore")
        attention = partial(packed_attention, bounds=bounds, longest=max(LENGTHS))
        found = _with_gradients(attention, inputs, grad)
    right = _with_gradients(_exact, [each.double() for each in inputs], grad.double())
    for name, one, other in zip(("output", "dq", "dk", "dv"), found, right, strict=True):
        error = float((one.double() - other).norm() / other.norm())
        if not error <= NEAR:
            raise ValueError(f"flash-attn-4 is wrong here: the error of {name} is {error:.2g}")


def _with_gradients(attention, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    inputs = [each.detach().requires_grad_() for each in inputs]
    output = attention(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def _exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    parts = []
    for q, k, v in zip(*(each.split(LENGTHS) for each in (query, key, value)), strict=True):
        scores = torch.einsum("qhc,khc->hqk", q, k) * q.size(-1) ** -0.5
        parts.append(torch.einsum("hqk,khc->qhc", scores.softmax(-1), v))
    return torch.cat(parts)
