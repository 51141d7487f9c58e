# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of packed sequences by flash-attn-4, with a backward that is right for heads of 80.

On Hopper, its backward (4.0.0b36) adds up the gradient of queries as heads of a multiple of 16
channels. The two steps around it, which fill that sum with zeros and read it, take a multiple of
32. So heads of 80 get wrong gradients, without a warning. Here all three take a multiple of 16.
"""

import functools
import math
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from types import FunctionType

import torch
from torch import Tensor

ROUNDED = 16
"""Channels to a multiple of which Hopper's kernel rounds heads of at most 128 channels up."""

SEVERAL_BLOCKS = 512
"""Tokens that no block of the kernels holds. They are compiled anew, for seconds in the midst of
training, where the longest sequence fits into one block."""

LENGTHS, NEAR = (203, 64, 1), 0.02
"""Lengths of the sequences that `check_kernel` compares, and the relative error that it allows;
16-bit numbers come to 0.003, wrong gradients to more than 1."""


def is_installed() -> bool:
    """Return whether flash-attn-4 is there; other versions of flash-attn have no such module."""
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


class _Attention(torch.autograd.Function):
    """Saves the three inputs as they are, and writes their gradients into one tensor.

    Where the inputs are parts of one tensor, the backward of its split then copies nothing.
    """

    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int
    ) -> Tensor:
        from flash_attn.cute.interface import _flash_attn_fwd  # starts a compiler

        packed = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        packed |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        output, sums, *_ = _flash_attn_fwd(query, key, value, return_lse=True, **packed)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.packed = packed
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        *heads, channels = grad.shape
        grads = grad.new_empty(*heads, 3 * channels).split(channels, dim=-1)
        written = dict(zip(("dq", "dk", "dv"), grads, strict=True))
        _backward()(*tensors[:4], grad, tensors[4], **written, **ctx.packed)
        return *grads, None, None


@functools.cache
def _backward() -> Callable:
    """Return flash-attn-4's backward, with one width of heads in all of its steps."""
    from flash_attn.cute import interface

    whole = interface._flash_attn_bwd
    if torch.cuda.get_device_capability()[0] != 9:
        return whole
    names = ("_bwd_preprocess", "_bwd_postprocess_convert")
    steps = {name: _with_kernels_width(getattr(interface, name)) for name in names}
    made = FunctionType(whole.__code__, vars(interface) | steps, argdefs=whole.__defaults__)
    made.__kwdefaults__ = whole.__kwdefaults__
    return made


def _with_kernels_width(step: Callable) -> Callable:
    def wrapped(*args, hdim_multiple_of: int, **kwargs):
        rounded = ROUNDED if hdim_multiple_of == 2 * ROUNDED else hdim_multiple_of
        return step(*args, hdim_multiple_of=rounded, **kwargs)

    return wrapped


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
    return _Attention.apply(query, key, value, bounds, max(longest, SEVERAL_BLOCKS))


def check_kernel(heads: int, channels: int, dtype: torch.dtype) -> None:
    """Compare outputs and gradients with attention in fp64 on three short sequences.

    Raises:
        ValueError: an error is too large; the message has it.
    """
    # The allocator hands this memory to the kernels, which must clear it before they add to it.
    unclear = [torch.full((1 << 17,), math.nan, device="cuda") for _ in range(64)]
    del unclear
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (4, sum(LENGTHS), heads, channels)
    drawn = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    bounds = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
    *inputs, grad = drawn.unbind()
    with warnings.catch_warnings():  # the compiler's own, of arguments that it leaves out
        warnings.simplefilter("ignore")
        attention = functools.partial(packed_attention, bounds=bounds, longest=max(LENGTHS))
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
