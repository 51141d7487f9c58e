# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The program's own model on the meta device: names and shapes of all tensors in a checkpoint."""

import contextlib
import os
import re
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from examples.mimo.nemotron_vlm.model.model import initial_draws
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options.run import Run
from examples.mimo.nemotron_vlm.planner.parameters import stages_on_meta
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.setup.initialization import initial_weights

MODULE = re.compile(r"(language_model|modality_submodules\.\w+)\.")
"""Prefix of a module's names; in checkpoints the data-parallel wrapper's follows it."""


class ProgramModel:
    """The model, with its tensors as ``parts``.

    A key of the model may hold several, numbered by leading dims: experts, or the encoder's layers.
    A part's name is its key, followed by its number.
    """

    def __init__(self, model: MimoModel, run: Run) -> None:
        state = model.sharded_state_dict()
        apply_factories(state)
        self._model, self._own, self.parts = model, initial_draws(run.preset), {}
        self.run = run
        for part in nested_values(state):
            if isinstance(part, ShardedTensor):
                numbers = part.global_offset[: part.prepend_axis_num]
                self.parts[part.key + "".join(f"[{number}]" for number in numbers)] = part

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts, without the dims that number them, by name."""
        return {name: tuple(part.local_shape) for name, part in self.parts.items()}

    def initial(self, name: str) -> torch.Tensor:
        """Return a part's initial weights in a run of the program with its usual seed."""
        return initial_weights(self._model, self.parts[name], self.run.args.seed, self._own)


@contextlib.contextmanager
def program_model(preset: VLMPreset, *words: str) -> Iterator[ProgramModel]:
    """Build the model of a preset on the meta device, as the only rank of a world.

    Args:
        words: options of adapters.
    """
    before = dict(os.environ)
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    try:
        with contextlib.redirect_stdout(None):
            run = Run.of(["--transformer-impl", "local", *words], 1, preset)
            with stages_on_meta(run, 0) as (model,):
                yield ProgramModel(model, run)
    finally:
        os.environ.clear()
        os.environ.update(before)


def box_of(part: ShardedTensor) -> ChunkStorageMetadata:
    """Return a part's box in the tensor of its key."""
    sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    return ChunkStorageMetadata(torch.Size(part.global_offset), torch.Size(sizes))


def saved_key(key: str) -> str:
    """Return the key in a checkpoint for a key of the bare model."""
    return MODULE.sub(r"\1.module.", key, count=1)
