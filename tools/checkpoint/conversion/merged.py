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
    return _Merged(saved) if any(map(is_adapter, saved.tensors)) else saved


def loading(directory: Path) -> list[str]:
    """Return the options with which the program loads a checkpoint, and its base."""
    saved, step = Checkpoint(directory), []
    if not directory.exists():  # FOLDER/best
        directory, step = directory.parent, [f"--ckpt-step={int(saved.directory.name[5:])}"]
    words = ["--finetune", f"--load={directory}", *step]
    if not any(map(is_adapter, saved.tensors)):
        return words if step else [f"--pretrained-checkpoint={directory}"]
    args, names = saved.options, ("lora_dim", "lora_alpha", "lora_target_modules", "train_parts")
    words += [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    words += [f"--pretrained-checkpoint={args.pretrained_checkpoint}"]
    return words + ["--lora-rs"] * args.lora_rs


def matrices_of(weight: str) -> tuple[str, str]:
    """Return the names of A and B for a weight's name, also if it is one of several parts."""
    stem, _, rest = weight.rpartition(".weight")
    a, b = (f"{stem}.adapter.linear_{each}.weight" for each in ("in", "out"))
    return a + re.sub(r"^\.\w+", "", rest), b + rest


def pairs_of(
    saved: Checkpoint, parts: Mapping[str, ShardedTensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return A and B of those parts of a model that have adapters in a checkpoint, by name."""
    keys = {name: matrices_of(part.key) for name, part in parts.items()}
    keys = {name: (a, b) for name, (a, b) in keys.items() if b in saved.tensors}
    held = saved.whole({key for pair in keys.values() for key in pair})
    places = {name: parts[name].global_offset[: parts[name].prepend_axis_num] for name in keys}
    return {name: (held[a][places[name]], held[b][places[name]]) for name, (a, b) in keys.items()}


class _Merged(Checkpoint):
    """A base with the adapters, and what was trained beside them."""

    def __init__(self, trained: Checkpoint) -> None:
        args = trained.options
        if not args.pretrained_checkpoint:
            raise UserError(
                f"{trained.directory}: its base has initial weights, which are not saved"
            )
        super().__init__(Path(args.pretrained_checkpoint))
        own = {key for key in trained.tensors if not is_adapter(key)}
        found = self._checksum(own, args.vocab_size)
        if args.lora_base not in (None, found):
            raise UserError(
                f"{trained.directory} has adapters of another base: its checksum is "
                f"{args.lora_base}, and {self.directory} has {found}; put the run's base there"
            )
        self._trained = trained
        self._scale = scale_of(args.lora_alpha, args.lora_dim, args.lora_rs)
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
        for name, pair in pairs_of(self._trained, parts).items():
            tensors[name] = merged(tensors[name], *pair, self._scale)
        return tensors
