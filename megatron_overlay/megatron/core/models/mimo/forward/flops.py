# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of encoders, to add to Megatron's count for the language model.

Data loading notes what a step's samples need, as means for a row.
"""

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple


class StepWork(NamedTuple):
    """The work of a step's rows, on average.

    operations: of all encoders for a row, forward and backward. packed: tokens of a packed row and
    the sum of its samples' squared lengths, both without padding; None without packing.
    """

    operations: float
    packed: tuple[float, float] | None = None


_noted = [StepWork(0.0)]


def note_work(work: StepWork) -> None:
    """Count the step that begins with this work of its rows."""
    _noted[0] = work


def with_modality_flops(count: Callable[..., float]) -> Callable[..., float]:
    """Add the encoders' operations to Megatron's count for a batch, and count packed rows.

    The work of the rows is that of the last `note_work`.
    """

    @functools.wraps(count)
    def counted(args: Namespace, batch_size: int, *more, **options) -> float:
        work = _noted[0]
        if work.packed:
            tokens, squares = (mean * batch_size for mean in work.packed)
            options["total_real_tokens_in_batch"] = tokens
            options["seqlen_squared_sum_in_batch"] = squares
        return count(args, batch_size, *more, **options) + work.operations * batch_size

    return counted


def vit_flops(
    patches: int, tokens: int, layers: int, hidden: int, ffn: int, patch_features: int
) -> float:
    """Count the operations of a ViT's forward and backward (3 × the forward, as in Megatron).

    Args:
        patches: patches that are embedded.
        tokens: tokens of the sequence (patches and class tokens); attention is not causal.
        patch_features: input features of one patch.
    """
    layer = 2 * tokens * (4 * hidden**2 + 2 * hidden * ffn) + 4 * tokens**2 * hidden
    return 3.0 * (layers * layer + 2 * patches * patch_features * hidden)


def mlp_flops(tokens: int, sizes: tuple[int, ...]) -> float:
    """Count the operations of forward and backward of linear layers between widths ``sizes``."""
    return 3.0 * sum(2 * tokens * a * b for a, b in zip(sizes, sizes[1:], strict=False))
