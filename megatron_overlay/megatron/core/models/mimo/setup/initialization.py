# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Initial weights as a function of (seed, parameter name, global index), whatever the layout.

A parameter is divided into blocks of rows. Each block is drawn from a generator seeded by the
parameter's name and the block's place; a rank draws those that its shard touches, several at a
time, of several parameters. The model's sharded state dict tells which part of a parameter the rank
holds, so tensor, expert and pipeline sharding need no rules of their own. Weights are drawn on the
CPU for GPUs too, as a GPU's generator draws other numbers. Distributions: matrices N(0, 1/fan in)
(LeCun et al., "Efficient BackProp", 1998), those that write to the residual stream scaled by
1/sqrt(2 · layers) (GPT-2); Mamba-2's own parameters as in its paper (arXiv 2405.21060).
"""

import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch

import torch

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.mimo.model.base import MimoModel

Draw = Callable[[torch.Tensor, torch.Generator, int], torch.Tensor]
"""Function ``(out, rng, inputs)`` that fills a block; ``inputs`` is the parameter's last dim."""

DT_RANGE = (1e-3, 1e-1)
A_RANGE = (1.0, 16.0)

BLOCK = 2**16
"""Elements of a block of rows, about: enough to outweigh the start of a thread, few enough that a
rank draws few rows beyond its shard's."""

TOGETHER = 16
"""Blocks that a thread draws before it asks for more."""

THREADS = 6
"""Most threads of a rank. More wait for Python's lock: for 18 billion elements 1, 4, 6, 16 and 32
threads took 92, 22, 20, 37 and 141 s."""

AHEAD = 8
"""Parameters that are drawn while another is copied to its place."""


def filled(value: float) -> Draw:
    """Return the draw of a constant."""
    return lambda out, _rng, _inputs: out.fill_(value)


def normal(std: float) -> Draw:
    """Return the draw of N(0, std²)."""
    return lambda out, rng, _inputs: out.normal_(0, std, generator=rng)


def fan_in_normal(out: torch.Tensor, rng: torch.Generator, inputs: int) -> torch.Tensor:
    """Draw N(0, 1/fan in); see ``Draw``."""
    return out.normal_(0, inputs**-0.5, generator=rng)


def _convolution(out: torch.Tensor, rng: torch.Generator, _inputs: int) -> torch.Tensor:
    return out.uniform_(-0.5, 0.5, generator=rng)


def _lora_in(out: torch.Tensor, rng: torch.Generator, inputs: int) -> torch.Tensor:
    return out.uniform_(-(inputs**-0.5), inputs**-0.5, generator=rng)  # as Hugging Face's peft


def _decay_rate(out: torch.Tensor, rng: torch.Generator, _inputs: int) -> torch.Tensor:
    return out.uniform_(*A_RANGE, generator=rng).log_()


def _time_step_bias(out: torch.Tensor, rng: torch.Generator, _inputs: int) -> torch.Tensor:
    step = out.uniform_(*map(math.log, DT_RANGE), generator=rng).exp()
    return step + torch.log(-torch.expm1(-step))


def _rules(layers: int, std: float | None) -> list[tuple[str, Draw]]:
    """Return the name patterns and their draws; the first match decides.

    Args:
        layers: depth of the module's own stack.
        std: standard deviation of matrices; None for 1/sqrt(fan in).
    """
    matrix = fan_in_normal if std is None else normal(std)

    def residual(out: torch.Tensor, rng: torch.Generator, inputs: int) -> torch.Tensor:
        return matrix(out, rng, inputs).div_(math.sqrt(2 * layers))

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


def _generator(seed: int, key: str, place: tuple[int, ...]) -> torch.Generator:
    text = f"{seed}/{key}/{place}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


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
    under_way: deque[tuple[ShardedTensor, Callable[[], torch.Tensor]]] = deque()

    def fill(at_most: int) -> None:
        while len(under_way) > at_most:
            part, drawn = under_way.popleft()
            part.data.copy_(drawn())

    with _threads() as pool:
        for part in nested_values(state):
            if isinstance(part, ShardedTensor):
                rules = _rules_of(model, part.key, std, own)
                under_way.append((part, _drawing(part, seed, rules, pool, part.data.dtype)))
                fill(AHEAD)
        fill(0)


def initial_weights(
    model: MimoModel, part: ShardedTensor, seed: int, own: Mapping[str, Draw] | None = None
) -> torch.Tensor:
    """Draw one shard in fp32, as ``initialize_weights`` does with ``std=None``.

    The model may be on the meta device.

    Args:
        part: a shard of the bare model's sharded state dict, with factories applied.
        own: as :func:`initialize_weights` takes it.
    """
    with _threads() as pool:
        return _drawing(part, seed, _rules_of(model, part.key, None, own), pool, torch.float32)()


def _threads() -> ThreadPoolExecutor:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return ThreadPoolExecutor(max(1, min(THREADS, (os.cpu_count() or 1) // ranks_here)))


def _rules_of(
    model: MimoModel, key: str, std: float | None, own: Mapping[str, Draw] | None
) -> list[tuple[str, Draw]]:
    std = std if key.startswith("language_model.") else None
    return [*(own or {}).items(), *_rules(_depth(model, key), std)]


def _drawing(
    part: ShardedTensor,
    seed: int,
    rules: list[tuple[str, Draw]],
    pool: ThreadPoolExecutor,
    dtype: torch.dtype,
) -> Callable[[], torch.Tensor]:
    """Let the pool's threads draw a shard; return what waits for it and returns it.

    Threads round blocks as they draw them: one thread would take longer for a GPU's 16-bit weights
    than all take to draw them.
    """
    draw = next((draw for name, draw in rules if fnmatch(part.key, name)), None)
    if draw is None:
        raise ValueError(f"no initialization rule names the parameter {part.key}")
    axes = part.prepend_axis_num
    shape, offset = part.global_shape[axes:], part.global_offset[axes:]
    start, held = offset[0], part.local_shape[0]
    rows = max(1, BLOCK // math.prod(shape[1:]))
    columns = [slice(a, a + n) for a, n in zip(offset[1:], part.local_shape[1:], strict=True)]
    own = torch.empty(part.local_shape, dtype=dtype)

    def fill(block: int) -> None:
        begin = block * rows
        place = (*part.global_offset[:axes], block, *[0] * len(columns))
        first, end = max(begin, start), min(begin + rows, start + held)
        mine = own[first - start : end - start]
        is_whole = mine.shape == (rows, *shape[1:]) and dtype == torch.float32
        # Drawn whole, so that no row depends on padding after it.
        out = mine if is_whole else torch.empty(rows, *shape[1:])
        drawn = draw(out, _generator(seed, part.key, place), shape[-1])
        if drawn is not mine:
            mine.copy_(drawn[(slice(first - begin, end - begin), *columns)])

    @torch.no_grad()
    def fill_all(blocks: range) -> None:
        for block in blocks:
            fill(block)

    blocks = range(start // rows, -(-(start + held) // rows))
    tasks = [
        pool.submit(fill_all, blocks[at : at + TOGETHER]) for at in range(0, len(blocks), TOGETHER)
    ]

    def drawn() -> torch.Tensor:
        for task in tasks:
            task.result()
        return own

    return drawn
