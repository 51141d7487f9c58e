# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Random numbers by place: functions of a key and an index, so that any rank draws any part.

The bits are SplitMix64's (Steele, Lea and Flood, OOPSLA 2014): its i-th output is a hash of
``key + i · gamma``. What follows is integers, and float32 sums, products, quotients and square
roots, one operator each, all of which IEEE 754 rounds in one way. So the numbers are the same bits
on every device and for every shape; ``log`` and ``cos`` differ by device and by vector length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TERMS = 4, 6, 7
"""Of the series of ln m, sin and cos; what is left out is below 1e-7, a float32's own error."""


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


GAMMA = _signed(0x9E3779B97F4A7C15)
MIX = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def hashed_bits(key: int, index: Tensor) -> Tensor:
    """64 random bits for each int64 of ``index``, as int64; ``key`` is any integer of 64 bits."""
    bits = (index * GAMMA).add_(_signed(key))
    for shift, factor in MIX:
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(factor)
    return bits.bitwise_xor_(_shifted(bits, 31))


def uniform(key: int, index: Tensor) -> Tensor:
    """A float64 in (0, 1) for each int64 of ``index``, on a grid of 2^-32."""
    return _shifted(hashed_bits(key, index), 32).double().add_(0.5).mul_(2.0**-32)


def normal_pairs(key: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent normal numbers, float32, for each int64 of ``index``.

    Box and Muller (1958): radius sqrt(-2 ln u), and an angle 2t with t uniform in [-π/2, π/2].
    """
    bits = hashed_bits(key, index)
    radius = _radius(_shifted(bits, 32).float().add_(0.5))
    half = bits.bitwise_left_shift_(32).bitwise_right_shift_(32).float().mul_(math.pi * 2.0**-32)
    square = half * half
    sine = _series(square, TERMS[1], first=1).mul_(half)
    cosine = _series(square, TERMS[2], first=0)
    twice = radius * 2
    return radius.sub_(sine.square().mul_(twice)), sine.mul_(cosine).mul_(twice)


def _radius(count: Tensor) -> Tensor:
    """sqrt(-2 ln(count / 2^32)) for counts in [1/2, 2^32], by their exponent and mantissa.

    With m in [1, 2) and s = (m - √2) / (m + √2): ln m = ln(2) / 2 + 2 (s + s³/3 + s⁵/5 + …).
    """
    bits = count.view(torch.int32)
    exponent = (bits >> 23).sub_(127 + 32).float()
    mantissa = bits.bitwise_and_(0x7FFFFF).bitwise_or_(0x3F800000).view(torch.float32)
    ratio = (mantissa - math.sqrt(2)).div_(mantissa + math.sqrt(2))
    square = ratio * ratio
    series = torch.full_like(square, 1 / (2 * TERMS[0] - 1))
    for power in reversed(range(1, 2 * TERMS[0] - 1, 2)):
        series.mul_(square).add_(1 / power)
    logarithm = series.mul_(ratio).mul_(-4).add_(exponent.add_(0.5).mul_(-2 * math.log(2)))
    return logarithm.clamp_(min=0).sqrt_()


def _series(square: Tensor, terms: int, first: int) -> Tensor:
    """Sum of (-1)^k x^2k / (2k + first)!, given x²: cos x for first = 0, sin x / x for 1."""
    total = torch.full_like(square, 1.0)
    for k in reversed(range(1, terms)):
        total.mul_(square).mul_(-1 / ((2 * k + first) * (2 * k + first - 1))).add_(1)
    return total


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Right shift that brings in zeros."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)
