# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of LoRA runs as whole models: adapters are merged into their base as it is read."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from conversion.torch_dist import Checkpoint
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.adapters import checksum, digits
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.lora import is_adapter, merged, scale_of


def whole_model(directory: Path) -> Checkpoint:
    """Open a checkpoint, a LoRA run's together with its base.

    Raises:
        UserError: there is no such checkpoint, or its base is not there or has changed.
    """
    saved = Checkpoint(directory)
    return _Merged(saved) if adapters_of(saved) else saved


def adapters_of(saved: Checkpoint) -> list[str]:
    """Return the keys of a checkpoint's adapters."""
    return list(filter(is_adapter, saved.tensors))


def loading(directory: Path) -> str:
    """Return the options with which the program loads a checkpoint, and its base."""
    saved = Checkpoint(directory)
    if not adapters_of(saved):
        return f"--pretrained-checkpoint {directory}"
    args, names = saved.options, ("lora_dim", "lora_alpha", "lora_target_modules", "train_parts")
    words = ["--finetune"] + [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    words += [f"--load={directory}", f"--pretrained-checkpoint={args.pretrained_checkpoint}"]
    return " ".join(words + ["--lora-rs"] * args.lora_rs)


def matrices_of(weight: str) -> tuple[str, str]:
    """Return the names of A and B for a weight's name, also if it is one of several parts."""
    stem, _, rest = weight.rpartition(".weight")
    a, b = (f"{stem}.adapter.linear_{each}.weight" for each in ("in", "out"))
    return a + re.sub(r"^\.\w+", "", rest), b + rest


class _Merged(Checkpoint):
    """A base with the adapters, and what was trained beside them."""

    def __init__(self, trained: Checkpoint) -> None:
        args = trained.options
        if not args.pretrained_checkpoint:
            raise UserError(
                f"{trained.directory}: its base has initial weights, which are not saved"
            )
        super().__init__(Path(args.pretrained_checkpoint))
        own = set(trained.tensors) - set(adapters_of(trained))
        found = self._checksum(own, args.vocab_size)
        if args.lora_base not in (None, found):
            raise UserError(
                f"{trained.directory} has adapters of another base: its checksum is "
                f"{args.lora_base}, and {self.directory} has {found}; put the run's base there"
            )
        self._trained = trained
        self._scale = scale_of(args.lora_alpha, args.lora_dim, args.lora_rs)
        self._held = trained.whole(adapters_of(trained))
        self.tensors |= {key: trained.tensors[key] for key in own}

    def _checksum(self, trained: set[str], words: int) -> str:
        """Return the checksum of the base's tensors, without those that were trained, by key."""
        total = torch.zeros(1, dtype=torch.int64)
        for key in self.tensors.keys() - trained:
            whole = ShardedTensor.from_rank_offsets(key, self.whole([key])[key])
            total += checksum(whole, words)
        return digits(total)

    def read(self, parts: Mapping[str, ShardedTensor]) -> dict[str, torch.Tensor]:
        """Read the tensors of parts, by name."""
        own = {name for name, part in parts.items() if part.key in self._trained.tensors}
        tensors = self._trained.read({name: parts[name] for name in own})
        tensors |= super().read({name: parts[name] for name in parts.keys() - own})
        for name, part in parts.items():
            first, second = matrices_of(part.key)
            if second in self._held:
                place = part.global_offset[: part.prepend_axis_num]
                pair = self._held[first][place], self._held[second][place]
                tensors[name] = merged(tensors[name], *pair, self._scale)
        return tensors
