# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Initial weights as a function of (seed, parameter name, global index), whatever the layout.

A rank draws its own part of every parameter, on the parameter's device: each number is a function
of its place alone, with the same bits on every device (``counted_numbers``). The distributed
checkpoint's view of the model says which part is the rank's, so tensor, expert and pipeline
sharding need no rules of their own. Distributions: matrices N(0, 1/fan in) (LeCun et al.,
"Efficient BackProp", 1998), those that write to the residual stream scaled by 1/sqrt(2 · layers)
(GPT-2); Mamba-2's own as in its paper (arXiv 2405.21060).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial

import torch
from torch import Tensor

from examples.mimo.nemotron_vlm.counted_numbers import normal_pairs, uniform
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.mimo.model.base import MimoModel

Draw = Callable[[int, Tensor, range, int], Tensor]
"""From a key, numbers of rows, and columns of rows that are so wide: values of ``[rows, columns]``.

A tensor's rows run along its last dim and are numbered over all others.
"""

DT_RANGE = (1e-3, 1e-1)
A_RANGE = (1.0, 16.0)
CPU_CHUNK = 2**17
"""Numbers a thread draws at once: few calls, and what they work on stays in its cache."""
GPU_CHUNK = 2**22


def _ones(_: int, rows: Tensor, columns: range, width: int) -> Tensor:
    return rows.new_ones(len(rows), len(columns))


def _zeros(_: int, rows: Tensor, columns: range, width: int) -> Tensor:
    return rows.new_zeros(len(rows), len(columns))


def _uniform(key: int, rows: Tensor, columns: range, width: int) -> Tensor:
    column = torch.arange(columns.start, columns.stop, device=rows.device)
    return uniform(key, rows[:, None] * width + column)


def _normal(key: int, rows: Tensor, columns: range, width: int) -> Tensor:
    """Columns 2j and 2j + 1 of a row are a pair."""
    first = columns.start // 2
    pair = torch.arange(first, (columns.stop + 1) // 2, device=rows.device)
    pairs = normal_pairs(key, rows[:, None] * ((width + 1) // 2) + pair)
    skipped = columns.start - 2 * first
    return torch.stack(pairs, -1).flatten(1)[:, skipped : skipped + len(columns)]


def _fan_in_normal(key: int, rows: Tensor, columns: range, width: int) -> Tensor:
    return _normal(key, rows, columns, width).mul_(width**-0.5)


def _convolution(*place) -> Tensor:
    bound = 0.5
    return _uniform(*place).sub_(0.5).mul_(2 * bound)


def _decay_rate(*place) -> Tensor:
    return _between(*A_RANGE, *place).log_()


def _time_step_bias(*place) -> Tensor:
    step = _between(*map(math.log, DT_RANGE), *place).exp_()
    return step + torch.log(-torch.expm1(-step))


def _between(low: float, high: float, *place) -> Tensor:
    return _uniform(*place).mul_(high - low).add_(low)


def _residual_normal(layers: int) -> Draw:
    def draw(*place) -> Tensor:
        return _fan_in_normal(*place).mul_((2 * layers) ** -0.5)

    return draw


def _rules(layers: int) -> list[tuple[str, Draw]]:
    """Name patterns, the first that matches decides; ``layers`` of the module's own stack."""
    residual = _residual_normal(layers)
    return [
        ("*conv1d.*", _convolution),
        ("*A_log", _decay_rate),
        ("*dt_bias", _time_step_bias),
        ("*.D", _ones),
        ("*norm.weight", _ones),
        ("*norm?.weight", _ones),
        ("*norm_weight", _ones),
        ("*bias", _zeros),
        ("*layers*.linear_proj.weight", residual),
        ("*layers*.out_proj.weight", residual),
        ("*layers*.linear_fc2.weight", residual),
        ("*.weight*", _fan_in_normal),
        ("*class_token", _fan_in_normal),
        ("*position_embeddings", _fan_in_normal),
    ]


def _depth(model: MimoModel, key: str) -> int:
    if key.startswith("language_model."):
        return model.mimo_config.language_model_spec.params["config"].num_layers
    name = key.split(".")[1]
    encoders = model.modality_submodules[name].encoders.values()
    return max(encoder.config.num_layers for encoder in encoders)


def _key(seed: int, name: str, prepended: tuple[int, ...]) -> int:
    text = f"{seed}/{name}/{prepended}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


@torch.no_grad()
def initialize_weights(model: MimoModel, seed: int) -> None:
    """Fill every parameter and buffer of ``model``, in place.

    Call it before the model is wrapped in DDP: names are those of the bare modules.

    Raises:
        ValueError: for a parameter that no rule names.
    """
    state = model.sharded_state_dict()
    apply_factories(state)
    for part in nested_values(state):
        if isinstance(part, ShardedTensor):
            _fill(part, seed, _depth(model, part.key))


def _fill(part: ShardedTensor, seed: int, layers: int) -> None:
    draw = next((draw for name, draw in _rules(layers) if fnmatch(part.key, name)), None)
    if draw is None:
        raise ValueError(f"no initialization rule names the parameter {part.key}")
    axes = part.prepend_axis_num
    key = _key(seed, part.key, part.global_offset[:axes])
    draw_part(part.data, part.global_shape[axes:], part.global_offset[axes:], partial(draw, key))


def draw_part(
    out: Tensor,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    draw: Callable[[Tensor, range, int], Tensor],
) -> None:
    """Fill ``out``, which lies at ``offset`` in a tensor of ``shape``, in place.

    It goes along the first dim in chunks, each of at least one index.
    """
    while out.dim() < 2:
        out, shape, offset = out[None], (1, *shape), (0, *offset)
    if not out.numel():
        return
    inner = torch.zeros(1, dtype=torch.int64, device=out.device)
    for size, start, length in zip(shape[1:-1], offset[1:-1], out.shape[1:-1], strict=True):
        along = torch.arange(start, start + length, device=out.device)
        inner = (inner[:, None] * size + along).flatten()
    columns = range(offset[-1], offset[-1] + out.shape[-1])
    chunk = GPU_CHUNK if out.is_cuda else CPU_CHUNK * torch.get_num_threads()
    start = offset[0]
    for part in out.split(max(1, chunk * len(out) // out.numel())):
        outer = torch.arange(start, start + len(part), device=out.device)
        rows = (outer[:, None] * math.prod(shape[1:-1]) + inner).flatten()
        part.copy_(draw(rows, columns, shape[-1]).view(part.shape))
        start += len(part)
