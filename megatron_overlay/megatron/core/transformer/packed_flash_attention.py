# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of packed sequences by flash-attn-4, with a backward that is right for heads of 80.

On Hopper, its backward adds up the gradient of queries as heads of a multiple of 16 channels. The
steps before and after, which fill the sum with zeros and read it, take a multiple of 32. So heads
of 80 get wrong gradients, without a warning. Here PyTorch fills the sum, and the last step reads a
multiple of 16. The first one must keep 32: with 16, its threads write beyond a sequence's rows.
"""

import functools
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType

import torch
from torch import Tensor

VERSION = "4.0.0b36"
"""The version whose private functions are called here."""

ROUNDED = 16
"""Hopper's kernel rounds the width of a head of up to 128 channels to a multiple of this."""

SEVERAL_BLOCKS = 512
"""Tokens that no block of the kernels holds. They are compiled anew, for seconds in the midst of
training, where the longest sequence fits into one block."""

LENGTHS, NEAR = (203, 64, 1), 0.02
"""Lengths of the sequences that `check_kernel` compares, and the relative error that it allows;
16-bit numbers come to 0.003, wrong gradients to 0.1 or more."""


def is_installed() -> bool:
    """Return whether flash-attn-4 is there, in the version that is used here."""
    try:
        return version("flash-attn-4") == VERSION
    except PackageNotFoundError:
        return False


def takes_width(channels: int) -> bool:
    """Return whether flash-attn-4's kernels can be compiled for heads with this many channels."""
    return channels % 8 == 0 and (channels <= 96 or 112 < channels <= 128)


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
        output, lse, *_ = _flash_attn_fwd(query, key, value, return_lse=True, **packed)
        ctx.save_for_backward(query, key, value, output, lse)
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
    """Return flash-attn-4's backward, with its last step in the width of heads of its kernel."""
    from flash_attn.cute import interface

    whole = interface._flash_attn_bwd
    if torch.cuda.get_device_capability()[0] != 9:
        return whole
    first, last = interface._bwd_preprocess, interface._bwd_postprocess_convert

    def from_zero(out, dout, dpsum, lse, lse_log2, dq_accum, *args, **kwargs):
        dq_accum.zero_()
        return first(out, dout, dpsum, lse, lse_log2, dq_accum, *args, **kwargs)

    def in_kernels_width(*args, hdim_multiple_of: int, **kwargs):
        rounded = ROUNDED if hdim_multiple_of == 2 * ROUNDED else hdim_multiple_of
        return last(*args, hdim_multiple_of=rounded, **kwargs)

    steps = {first.__name__: from_zero, last.__name__: in_kernels_width}
    made = FunctionType(whole.__code__, vars(interface) | steps, argdefs=whole.__defaults__)
    made.__kwdefaults__ = whole.__kwdefaults__
    return made


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int
) -> Tensor:
    """Let the tokens of each packed sequence attend to all tokens of the same one.

    Args:
        query, key, value: [tokens, heads, channels], in 16 bits, with as many heads each.
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
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (sum(LENGTHS), heads, 4 * channels)
    drawn = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    bounds = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
    *inputs, grad = drawn.split(channels, dim=-1)  # parts of one tensor, as in layers
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
