# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of packed sequences by flash-attn-4, in heads of a width that it computes right.

On Hopper, its backward (4.0.0b36) writes the gradient of queries as heads of a multiple of 16
channels, and reads it as heads of a multiple of 32. So heads of 80 get wrong gradients, without a
warning. Zeros fill heads up to such a multiple here: they change neither scores nor outputs.
"""

import warnings
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.jit import jit_fuser

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


class _WideHeads(torch.autograd.Function):
    """See `wide_heads`."""

    @staticmethod
    def forward(ctx, mixed: Tensor, channels: int) -> tuple[Tensor, ...]:
        ctx.channels = channels
        return _split(mixed, channels, channels + -channels % WIDTH).unbind(-2)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return _joined(*grads, ctx.channels), None


class _Cut(torch.autograd.Function):
    """Take the first channels of heads."""

    @staticmethod
    def forward(ctx, heads: Tensor, channels: int) -> Tensor:
        ctx.width = heads.size(-1)
        return heads[..., :channels].contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _filled(grad, ctx.width), None


@jit_fuser
def _filled(heads: Tensor, width: int) -> Tensor:
    return F.pad(heads, (0, width - heads.size(-1)))


@jit_fuser
def _split(mixed: Tensor, channels: int, width: int) -> Tensor:
    return F.pad(mixed.unflatten(-1, (-1, 3, channels)), (0, width - channels))


@jit_fuser
def _joined(query: Tensor, key: Tensor, value: Tensor, channels: int) -> Tensor:
    return torch.stack((query, key, value), -2)[..., :channels].flatten(-3)


def wide_heads(mixed: Tensor, channels: int) -> tuple[Tensor, ...]:
    """Split the output of Megatron's ``linear_qkv`` into heads of a width that `packed_attention`
    computes right.

    Args:
        mixed: [..., heads · 3 · channels]; each head has its query, key and value.

    Returns:
        Queries, keys and values, [..., heads, width].
    """
    return _WideHeads.apply(mixed, channels)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, channels: int, bounds: Tensor, longest: int
) -> Tensor:
    """Let the tokens of each packed sequence attend to all tokens of the same one.

    Args:
        query, key, value: of `wide_heads`, [tokens, heads, width], in 16 bits.
        channels: of a head, without the zeros.
        bounds: int32 [sequences + 1], where each sequence begins, and the end of the last.
        longest: tokens of the longest sequence.

    Returns:
        [tokens, heads, channels].
    """
    from flash_attn.cute import flash_attn_varlen_func  # starts a compiler

    packed = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    bound = max(longest, SEVERAL_BLOCKS)
    packed |= {"max_seqlen_q": bound, "max_seqlen_k": bound}
    attended, _ = flash_attn_varlen_func(query, key, value, softmax_scale=channels**-0.5, **packed)
    return _Cut.apply(attended, channels)


def check_kernel(heads: int, channels: int, dtype: torch.dtype) -> None:
    """Compare outputs and gradients with attention in fp64 on three short sequences.

    Raises:
        ValueError: an error is too large; the message has it.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (sum(LENGTHS), heads, 4, channels)
    drawn = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    bounds = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
    mixed, grad = drawn[:, :, :3], drawn[:, :, 3]

    def attention(mixed: Tensor) -> Tensor:
        wide = wide_heads(mixed.flatten(1), channels)
        return packed_attention(*wide, channels, bounds, max(LENGTHS))

    with warnings.catch_warnings():  # the compiler's own, of arguments that it leaves out
        warnings.simplefilter("ignore")
        found = _with_gradients(attention, mixed, grad)
    right = _with_gradients(_exact, mixed.double(), grad.double())
    for name, one, other in zip(("output", "dq", "dk", "dv"), found, right, strict=True):
        error = float((one.double() - other).norm() / other.norm())
        if not error <= NEAR:
            raise ValueError(f"flash-attn-4 is wrong here: the error of {name} is {error:.2g}")


def _with_gradients(attention, mixed: Tensor, grad: Tensor) -> list[Tensor]:
    mixed = mixed.detach().requires_grad_()
    output = attention(mixed)
    (of_mixed,) = torch.autograd.grad(output, mixed, grad)
    return [output.detach(), *of_mixed.unbind(-2)]


def _exact(mixed: Tensor) -> Tensor:
    parts = []
    for query, key, value in (each.unbind(-2) for each in mixed.split(LENGTHS)):
        scores = torch.einsum("qhc,khc->hqk", query, key) * query.size(-1) ** -0.5
        parts.append(torch.einsum("hqk,khc->qhc", scores.softmax(-1), value))
    return torch.cat(parts)
