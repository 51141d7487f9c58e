# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Initial weights as a function of (seed, parameter name, global index), whatever the layout.

Every parameter is drawn whole, on the CPU, from a generator seeded with its global name; a rank
then keeps its own part. The distributed checkpoint's view of the model says which part that is, so
tensor, expert and pipeline sharding need no rules of their own. Distributions: matrices N(0, 1/fan
in) (LeCun et al., "Efficient BackProp", 1998), those that write to the residual stream scaled by
1/sqrt(2 · layers) (GPT-2); Mamba-2's own as in its paper (arXiv 2405.21060).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from fnmatch import fnmatch

import torch

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.mimo.model.base import MimoModel

Draw = Callable[[torch.Tensor, torch.Generator], torch.Tensor]

DT_RANGE = (1e-3, 1e-1)
A_RANGE = (1.0, 16.0)


def _ones(out: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    return out.fill_(1)


def _zeros(out: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    return out.zero_()


def _fan_in_normal(out: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    return out.normal_(0, out.shape[-1] ** -0.5, generator=rng)


def _convolution(out: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    bound = 0.5
    return out.uniform_(-bound, bound, generator=rng)


def _decay_rate(out: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    return out.uniform_(*A_RANGE, generator=rng).log_()


def _time_step_bias(out: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    step = out.uniform_(*map(math.log, DT_RANGE), generator=rng).exp()
    return step + torch.log(-torch.expm1(-step))


def _residual_normal(layers: int) -> Draw:
    def draw(out: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        return _fan_in_normal(out, rng).div_(math.sqrt(2 * layers))

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


def _generator(seed: int, key: str, prepended: tuple[int, ...]) -> torch.Generator:
    text = f"{seed}/{key}/{prepended}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


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
    rng = _generator(seed, part.key, part.global_offset[:axes])
    whole = draw(torch.empty(part.global_shape[axes:]), rng)
    window = tuple(
        slice(start, start + size)
        for start, size in zip(part.global_offset[axes:], part.local_shape, strict=True)
    )
    part.data.copy_(whole[window])
