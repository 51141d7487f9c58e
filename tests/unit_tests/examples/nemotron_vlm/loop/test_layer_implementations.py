# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints go from layers without extra states to layers with them, and back.

Transformer Engine's norms have an extra state and PyTorch's have none, but both implementations ask
a checkpoint for a norm by the same name.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.nn import LayerNorm, RMSNorm

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.presets import tiny
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.models.mimo.weights import assert_shards_equal, gather_weights
from tests.unit_tests.test_utilities import requires_world_size

NONE = torch.empty(0, dtype=torch.uint8)
"""Extra state of an engine's norm without FP8."""


@contextmanager
def engine_norms() -> Iterator[list[torch.Tensor | None]]:
    """Give norms an extra state, as the engine's have; yield the states that they are to load."""
    loaded: list[torch.Tensor | None] = []
    with pytest.MonkeyPatch.context() as patch:
        for norm in (LayerNorm, RMSNorm):
            patch.setattr(norm, "get_extra_state", lambda norm: NONE)
            patch.setattr(norm, "set_extra_state", lambda norm, given: loaded.append(given))
        yield loaded


def run_of(*arguments: str, preset=None):
    sizes = ("--global-batch-size", "4", "--micro-batch-size", "4")
    return trainer(*sizes, *arguments, preset=preset)


def objects_in(checkpoint: Path) -> set[str]:
    """Keys of the norms' extra states."""
    keys = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {key for key in keys if "norm" in key and "_extra_state" in key}


@requires_world_size(1)
class TestOneRank:
    @pytest.mark.parametrize("saves_them", [False, True])
    def test_layers_with_them_and_layers_without_them_go_on_alike(self, saves_them, tmp_path):
        """Weights and the optimizer's state are loaded: the next steps are the same."""
        norms = {True: engine_norms, False: partial(nullcontext, [])}
        with norms[saves_them](), run_of() as run:
            run.train_step()
            run.save(tmp_path)
            saved, expected = gather_weights(run.stages), run.train_step()
        assert bool(objects_in(tmp_path / "iter_0000001")) == saves_them
        with norms[not saves_them]() as loaded, run_of("--load", str(tmp_path)) as run:
            assert bool(loaded) == (not saves_them) and all(given is NONE for given in loaded)
            assert_shards_equal(run.stages, saved)
            assert run.train_step() == expected

    def test_a_weight_that_is_missing_is_refused_by_name(self, tmp_path):
        """The model has one layer more; its extra state is not missed."""
        with run_of() as run:
            run.save(tmp_path)
        language = tiny().language
        language = replace(language, hybrid_layer_pattern=language.hybrid_layer_pattern + "M")
        longer = replace(tiny(), name="longer", language=language)
        with engine_norms(), pytest.raises(UserError) as refusal:
            with run_of("--load", str(tmp_path), "--finetune", preset=longer):
                pass
        assert re.search(r"layers\.8\.\S+ from model not in state dict", str(refusal.value))
