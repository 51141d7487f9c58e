# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The program's own model on the meta device: names and shapes of all tensors in a checkpoint."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.mimo.nemotron_vlm.model.presets import VLMPreset, write_preset
from examples.mimo.nemotron_vlm.options.arguments import parse
from examples.mimo.nemotron_vlm.planner.parameters import stages_on_meta
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.setup.initialization import initial_weights

WRAPPED = {
    "language_model.": "language_model.module.",
    "modality_submodules.images.": "modality_submodules.images.module.",
}
"""Prefixes of the bare model and of checkpoints, which include the data-parallel wrapper."""


@dataclass(frozen=True)
class Part:
    """A tensor of a module; a key of the checkpoint may hold several.

    name: the key without wrappers, followed by the number of the expert or layer. key,
    global_shape: those in the checkpoint. offset, sizes: the tensor's box in the global shape.
    shape: the tensor's own, without the leading dims that number it.
    """

    name: str
    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    sharded: ShardedTensor


@dataclass(frozen=True)
class ProgramModel:
    """The model with its tensors as ``parts``, by name."""

    model: MimoModel
    parts: dict[str, Part]

    def initial(self, part: Part, seed: int) -> torch.Tensor:
        """Return a part's initial weights in the program."""
        return initial_weights(self.model, part.sharded, seed)


@contextlib.contextmanager
def program_model(preset: VLMPreset) -> Iterator[ProgramModel]:
    """Build the model of a preset on the meta device, as the only rank of a world."""
    before = dict(os.environ)
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    try:
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
            path = Path(directory) / "model.json"
            write_preset(preset, path)
            options = parse(["--model", str(path), "--transformer-impl", "local"], 1)
            with stages_on_meta(options, 0) as (model,):
                yield _described(model)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _described(model: MimoModel) -> ProgramModel:
    state = model.sharded_state_dict()
    apply_factories(state)
    parts = [_part(value) for value in nested_values(state) if isinstance(value, ShardedTensor)]
    return ProgramModel(model, {part.name: part for part in parts})


def _part(sharded: ShardedTensor) -> Part:
    numbered = sharded.prepend_axis_num
    numbers = sharded.global_offset[:numbered]
    return Part(
        name=sharded.key + "".join(f"[{number}]" for number in numbers),
        key=saved_key(sharded.key),
        global_shape=tuple(sharded.global_shape),
        offset=tuple(sharded.global_offset),
        sizes=(1,) * numbered + tuple(sharded.local_shape),
        shape=tuple(sharded.local_shape),
        sharded=sharded,
    )


def saved_key(key: str) -> str:
    """Return the key in a checkpoint for a key of the bare model."""
    (bare,) = (prefix for prefix in WRAPPED if key.startswith(prefix))
    return WRAPPED[bare] + key.removeprefix(bare)
