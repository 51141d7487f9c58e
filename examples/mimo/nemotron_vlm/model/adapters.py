# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""LoRA of the model: which layers have adapters, and what a run trains and saves."""

from __future__ import annotations

import hashlib
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import reduce

import torch
import torch.distributed as dist

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.part_settings import ModelPart, adapted_parts, part_of
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    apply_factories,
    is_main_replica,
)
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.schedule.replaced import replaced
from megatron.core.transformer.adapted_layers import (
    add_adapters,
    linear_layers,
    require_input_gradients,
)
from megatron.core.transformer.lora import LoRA, is_adapter, scale_of

ALL_LINEAR = "all-linear"
"""Word for all linear layers of a stack of layers."""

VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
"""Ends of names of tensors with a row for each word, and rows of padding after them."""

FACTOR = 0x2545F4914F6CDD1D
"""An odd factor that turns the place of an element into a number of its own."""


@dataclass(frozen=True)
class Adapters:
    """The adapters that options ask for.

    words: of ``--lora-target-modules``, each ``[NAME:]PATTERN``: the encoder, without one the
    language model, and a pattern of the end of layers' names. parts: those in which words look.
    """

    settings: LoRA
    words: tuple[str, ...]
    parts: frozenset[ModelPart]

    @classmethod
    def of(cls, args: Namespace, names: list[str]) -> Adapters | None:
        """Return the adapters of a run; None without LoRA."""
        if not args.lora_dim:
            return None
        scale = scale_of(args.lora_alpha, args.lora_dim, args.lora_rs)
        words = tuple(args.lora_target_modules.split(","))
        settings = LoRA(args.lora_dim, scale, args.lora_dropout)
        return cls(settings, words, adapted_parts(args, names))

    def words_for(self, name: str) -> list[str]:
        """Return the words that choose a layer, by its name in the whole model.

        Only layers of a stack can be chosen: others are not always called as a layer, so that an
        adapter would change nothing.
        """
        module, part = part_of(name)
        is_inner = ".layers." in name and part != "projector" and not name.endswith(".eh_proj")
        found = []
        for word in self.words:
            of, _, pattern = word.rpartition(":")
            is_hit = pattern == ALL_LINEAR or fnmatch(f".{name}", f"*.{pattern}")
            if is_inner and of == module * (part == "encoder") and is_hit:
                found.append(word)
        return found

    def check(self, found: Collection[str]) -> None:
        """Check that each word has chosen a layer, of all ranks'.

        Raises:
            UserError: one has not.
        """
        if missed := [word for word in self.words if word not in found]:
            raise UserError(
                f"--lora-target-modules {missed[0]}: no layer's name ends like this; a word is "
                f"{ALL_LINEAR}, or a pattern such as linear_qkv, linear_proj, linear_fc1, "
                "linear_fc2, in_proj, out_proj or experts.linear_fc1, with NAME: before it for an "
                "encoder"
            )


def _whole_name(stage: MimoModel, name: str) -> str:
    """Return a layer's name with its number in the whole model, and without an expert's."""
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part == "layers":
            layer = stage.get_submodule(".".join(parts[: place + 2]))
            number = getattr(layer, "layer_number", None)
            parts[place + 1] = parts[place + 1] if number is None else str(number - 1)
    return re.sub(r"\.local_experts\.\d+\.", ".", ".".join(parts))


class AdaptedModel(MimoModel):
    """A MimoModel with adapters.

    Attributes:
        words: the words that have chosen a layer here.
        frozen: parts whose own weights are not trained.
        takes: tells from a parameter's name whether it is in checkpoints; all are, until
            `save_trained`.
    """

    def __init__(self, config: MimoModelConfig, adapters: Adapters) -> None:
        super().__init__(config)
        layers = [name for name, _ in linear_layers(self)]
        chosen = {name: adapters.words_for(_whole_name(self, name)) for name in layers}
        add_adapters(self, adapters.settings, [name for name in layers if chosen[name]])
        self.words = {word for words in chosen.values() for word in words}
        for module in self.modules():
            if isinstance(module, HybridStack):
                require_input_gradients(module)

    frozen: frozenset[ModelPart] = frozenset()

    def takes(self, _name: str) -> bool:
        return True

    def is_trained(self, name: str) -> bool:
        """Return whether a parameter belongs to an adapter, or to a part that is trained."""
        return is_adapter(name) or part_of(name) not in self.frozen

    def save_trained(self, frozen: frozenset[ModelPart]) -> None:
        """From here on, have in checkpoints what is trained alone."""
        self.frozen, self.takes = frozen, self.is_trained

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Return the state that checkpoints have.

        A load drops an empty one, which Megatron would miss: it gets an entry that is not saved.
        """
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        taken = {name: part for name, part in state.items() if self.takes(name)}
        return taken or {"nothing": LocalNonpersistentObject(None)}


@contextmanager
def loading_base(stages: list[AdaptedModel]) -> Iterator[None]:
    """Inside, a checkpoint is all but adapters."""
    with ExitStack() as stack:
        for stage in stages:
            stack.enter_context(replaced(stage, takes=lambda name: not is_adapter(name)))
        yield


def base_and_counts(
    stages: list[AdaptedModel], words: int
) -> tuple[str, dict[tuple[ModelPart, str], int]]:
    """Return the checksum of all frozen weights, and numbers of parameters. Collective.

    Args:
        words: size of the vocabulary without padding.

    Returns:
        The checksum as :func:`digits` writes it; parameters by part, and by ``adapted``,
        ``trained`` and ``frozen``.
    """
    device = torch.cuda.current_device()
    total, counts = torch.zeros(1, dtype=torch.int64, device=device), Counter()
    for stage in stages:
        state = MimoModel.sharded_state_dict(stage)
        for name in list(state):
            single = {name: state[name]}
            apply_factories(single)
            for part in nested_values(single):
                if not (isinstance(part, ShardedTensor) and is_main_replica(part.replica_id)):
                    continue
                kind = "adapted" if is_adapter(name) else "trained"
                if not stage.is_trained(name):
                    kind = "frozen"
                    total += checksum(part, words)
                counts[part_of(name), kind] += part.data.numel()
    dist.all_reduce(total)
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, counts)
    return digits(total), dict(reduce(Counter.__add__, everywhere))


def digits(total: torch.Tensor) -> str:
    """Return a sum of checksums in hexadecimal digits."""
    return f"{int(total) % 2**64:016x}"


@torch.no_grad()
def checksum(part: ShardedTensor, words: int) -> torch.Tensor:
    """Return the checksum ``[1]`` of a part of a model's weights.

    The sum over all parts is the same in every layout and precision: it adds up, modulo 2⁶⁴, the
    weights' bits in bfloat16, each times a factor that its name and its place decide.

    Args:
        words: rows that count of an embedding; later ones are padding.
    """
    key = part.key.replace(".module.", ".")  # DDP's, or none
    first = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")
    axes, data = part.prepend_axis_num, part.data
    if key.endswith(VOCABULARY):
        data = data[: max(0, words - part.global_offset[axes])]
    sums, step = data.to(torch.bfloat16).view(torch.int16).unsqueeze(0), 1
    total = torch.zeros(1, dtype=torch.int64, device=data.device)
    # A place adds up over the axes: so it is enough to add up the bits along each, from the last.
    for axis in reversed(range(len(part.global_shape))):
        here, places = sums, torch.tensor(part.global_offset[axis], device=data.device)
        if axis >= axes:
            here, sums = _sums(sums)
            places = places + torch.arange(len(here), device=data.device)
        total += (here * places * step).sum()
        step *= part.global_shape[axis]
    return total * FACTOR + sums * first


def _sums(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums ``[n]`` and ``[...]`` of whole numbers ``[..., n]`` over each side's axes."""
    total, sums, rows = 0, [], numbers.flatten(0, -2)
    # Doubles hold them, and CPUs add doubles up several times as fast as integers. A few at a time
    # stay in a core's cache; they stay in one place, because the system clears new memory first.
    at_once = max(1, (2**22 if numbers.is_cuda else 2**14) // rows.size(1))
    doubles = torch.empty(at_once, rows.size(1), dtype=torch.double, device=rows.device)
    for some in rows.split(at_once):
        some = doubles[: len(some)].copy_(some)
        total = total + some.sum(0)
        sums.append(some.sum(-1))
    return total.long(), torch.cat(sums).long().view(numbers.shape[:-1])
