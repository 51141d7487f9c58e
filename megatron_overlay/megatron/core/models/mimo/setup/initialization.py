# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Initial weights as a function of (seed, parameter name, global index), whatever the layout.

The model's sharded state dict tells which part of a parameter the rank holds, so tensor, expert and
pipeline sharding need no rules of their own. Each element's number comes from its own index alone,
on the device that holds the parameter; a CPU and a GPU draw the same ones, as their logarithms and
cosines are rounded from 64 bits. Distributions: matrices N(0, 1/fan in) (LeCun et al., "Efficient
BackProp", 1998), those that write to the residual stream scaled by 1/sqrt(2 · layers) (GPT-2);
Mamba-2's own parameters as in its paper (arXiv 2405.21060).
"""

import hashlib
import math
import operator
from collections.abc import Callable, Mapping
from fnmatch import fnmatch

import torch

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.mimo.model.base import MimoModel

DT_RANGE = (1e-3, 1e-1)
A_RANGE = (1.0, 16.0)

AT_ONCE = 2**20
"""Elements drawn at once, about: a few temporary tensors of 8 MiB."""

GAMMA, FIRST, SECOND = (
    odd - 2**64 for odd in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""The odd constants of SplitMix64, as signed numbers of 64 bits."""


class Numbers:
    """Random numbers of 64 bits, each a function of a key and an index alone.

    They are SplitMix64's (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
    OOPSLA 2014), which has state ``key + index · GAMMA`` there.

    Args:
        key: start of the sequence, a signed number of 64 bits.
        index: place of each number in the sequence; int64, of any shape.
    """

    def __init__(self, key: int, index: torch.Tensor) -> None:
        bits = index * GAMMA + key
        for shift, factor in ((30, FIRST), (27, SECOND)):
            bits = (bits ^ _shifted(bits, shift)) * factor
        self.bits = bits ^ _shifted(bits, 31)

    def uniform(self, low: float, high: float) -> torch.Tensor:
        """Return numbers of [low, high) in fp64, from the upper 32 bits."""
        return _shifted(self.bits, 32).double().mul_((high - low) / 2**32).add_(low)

    def normal(self, std: float) -> torch.Tensor:
        """Return numbers of N(0, std²) in fp64, by Box and Muller's transform of both halves."""
        radius = (_shifted(self.bits, 32) + 1).double().mul_(2**-32).log_().mul_(-2).sqrt_()
        angle = (self.bits & 0xFFFFFFFF).double().mul_(math.tau / 2**32)
        return radius.mul_(angle.cos_()).mul_(std)


def _shifted(bits: torch.Tensor, places: int) -> torch.Tensor:
    """Shift to the right, with zeros on the left."""
    return (bits >> places) & (2 ** (64 - places) - 1)


Draw = Callable[[Numbers, int], torch.Tensor]
"""Function ``(numbers, inputs)`` that returns values of the numbers' shape; ``inputs`` is the
parameter's last dim."""


def filled(value: float) -> Draw:
    """Return the draw of a constant."""
    return lambda numbers, _inputs: torch.full_like(numbers.bits, value, dtype=torch.float64)


def normal(std: float) -> Draw:
    """Return the draw of N(0, std²)."""
    return lambda numbers, _inputs: numbers.normal(std)


def fan_in_normal(numbers: Numbers, inputs: int) -> torch.Tensor:
    """Draw N(0, 1/fan in); see ``Draw``."""
    return numbers.normal(inputs**-0.5)


def _convolution(numbers: Numbers, _inputs: int) -> torch.Tensor:
    return numbers.uniform(-0.5, 0.5)


def _lora_in(numbers: Numbers, inputs: int) -> torch.Tensor:
    return numbers.uniform(-(inputs**-0.5), inputs**-0.5)  # as Hugging Face's peft


def _decay_rate(numbers: Numbers, _inputs: int) -> torch.Tensor:
    return numbers.uniform(*A_RANGE).log_()


def _time_step_bias(numbers: Numbers, _inputs: int) -> torch.Tensor:
    step = numbers.uniform(*map(math.log, DT_RANGE)).exp_()
    return step + torch.log(-torch.expm1(-step))


def _rules(layers: int, std: float | None) -> list[tuple[str, Draw]]:
    """Return the name patterns and their draws; the first match decides.

    Args:
        layers: depth of the module's own stack.
        std: standard deviation of matrices; None for 1/sqrt(fan in).
    """
    matrix = fan_in_normal if std is None else normal(std)

    def residual(numbers: Numbers, inputs: int) -> torch.Tensor:
        return matrix(numbers, inputs).div_(math.sqrt(2 * layers))

    return [
        ("*.adapter.linear_in.weight", _lora_in),
        ("*.adapter.linear_out.weight*", filled(0)),
        ("*conv1d.*", _convolution),
        ("*A_log", _decay_rate),
        ("*dt_bias", _time_step_bias),
        ("*.D", filled(1)),
        ("*norm.weight", filled(1)),
        ("*norm?.weight", filled(1)),
        ("*norm_weight", filled(1)),
        ("*bias", filled(0)),
        ("*layers*.linear_proj.weight", residual),
        ("*layers*.out_proj.weight", residual),
        ("*layers*.linear_fc2.weight", residual),
        ("*.weight*", matrix),
        ("*.gate_weight", matrix),
        ("*class_token", fan_in_normal),
        ("*position_embeddings", fan_in_normal),
    ]


def _depth(model: MimoModel, key: str) -> int:
    if key.startswith("language_model."):
        return model.mimo_config.language_model_spec.params["config"].num_layers
    name = key.split(".")[1]
    encoders = model.modality_submodules[name].encoders.values()
    return max(encoder.config.num_layers for encoder in encoders)


@torch.no_grad()
def initialize_weights(
    model: MimoModel, seed: int, std: float | None, own: Mapping[str, Draw] | None = None
) -> None:
    """Fill every parameter and buffer of ``model``, in place.

    Call it before the model is wrapped in DDP: the rules match names of the bare modules.

    Args:
        std: standard deviation of the language model's matrices; None for 1/sqrt(fan in).
        own: draws by patterns of names, which take precedence over the rules here.

    Raises:
        ValueError: no rule matches a parameter's name.
    """
    state = model.sharded_state_dict()
    apply_factories(state)
    for part in nested_values(state):
        if isinstance(part, ShardedTensor):
            of_matrices = std if part.key.startswith("language_model.") else None
            rules = [*(own or {}).items(), *_rules(_depth(model, part.key), of_matrices)]
            part.data.copy_(_drawn(part, seed, rules))


def _drawn(part: ShardedTensor, seed: int, rules: list[tuple[str, Draw]]) -> torch.Tensor:
    """Draw a shard, some rows at a time."""
    draw = next((draw for name, draw in rules if fnmatch(part.key, name)), None)
    if draw is None:
        raise ValueError(f"no initialization rule names the parameter {part.key}")
    digest = hashlib.blake2b(f"{seed}/{part.key}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "big", signed=True)
    axes, shape = part.prepend_axis_num, part.global_shape
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(map(operator.mul, part.global_offset, strides))
    device = part.data.device
    index = torch.tensor(start, device=device)
    for size, stride in zip(part.local_shape[1:], strides[axes + 1 :], strict=True):
        index = index[..., None] + torch.arange(size, device=device) * stride
    drawn = torch.empty(part.local_shape, dtype=part.data.dtype, device=device)
    at_once = max(1, AT_ONCE // index.numel())
    rows = torch.arange(len(drawn), device=device).view(-1, *[1] * index.ndim) * strides[axes]
    for out, firsts in zip(drawn.split(at_once), rows.split(at_once), strict=True):
        # Rounded to 32 bits first, as they are in fp32.
        out.copy_(draw(Numbers(key, firsts + index), shape[-1]).float())
    return drawn
