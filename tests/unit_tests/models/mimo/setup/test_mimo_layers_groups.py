# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Every layer exchanges within its own module's groups: no other has, and none is left out."""

import inspect

import pytest
import torch
import torch.distributed as dist

from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.utils import split_tensor_into_1d_equal_chunks
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import Utils, requires_world_size

FIELDS = {
    "tp_group": "tp",
    "attn_tp_group": "tp",
    "cp_group": "cp",
    "pp_group": "pp",
    "ep_group": "ep",
    "tp_cp_group": "tp_cp",
    "tp_dp_cp_group": "tp_dp_cp",
}
"""Attributes of layers, and the fields of a collection that they must be."""


def ranks(group: dist.ProcessGroup | None) -> list[int] | None:
    return group and dist.get_process_group_ranks(group)


@requires_world_size(4)
@pytest.mark.parametrize(
    ("model", "encoder", "language"),
    [
        ("tiny-gdn", "tp=4", "tp=2,dp=2,ep=4,etp=1"),
        ("tiny", "tp=2,dp=2", "tp=2,cp=2,dp=1,ep=2,etp=1"),
        ("tiny-omni", "images:tp=2,dp=2 sound:dp=4", "tp=4,dp=1,ep=2,etp=2"),
    ],
)
def test_every_layer_has_the_groups_of_its_module(model, encoder, language):
    encoders = [word for each in encoder.split() for word in ("--encoder", each)]
    with trainer("--model", model, *encoders, "--language", language) as run:
        (stage,), wrong, layers = run.stages, [], 0
        for module, held in {LANGUAGE: stage.language_model, **stage.modality_submodules}.items():
            groups = run.session.modules[module].groups
            for name, layer in held.named_modules():
                is_expert = ".experts" in name
                for attribute in FIELDS.keys() & vars(layer).keys():
                    field = FIELDS[attribute]
                    field = "expt_tp" if is_expert and field == "tp" else field
                    if ranks(getattr(layer, attribute)) != ranks(getattr(groups, field)):
                        wrong.append(f"{module}.{name}.{attribute}")
                layers += isinstance(layer, ColumnParallelLinear | RowParallelLinear)
        assert layers > 20 and not wrong
        config = stage.language_model.config
        assert config.sequence_parallel and config.tensor_model_parallel_size > 1


@requires_world_size(2)
def test_logits_stay_split_where_the_loss_is_taken():
    """The loss takes logits for a shard of the vocabulary, also if they have been gathered."""
    with trainer("--encoder", "tp=2", "--language", "tp=2") as run:
        model = run.stages[0].language_model.module
        assert model.parallel_output and not model.output_layer.gather_output
    assert "runtime_gather_output" not in inspect.signature(MimoModel.forward).parameters


EXCHANGES = {
    "gather along the sequence": mappings.gather_from_sequence_parallel_region,
    "scatter along the sequence": mappings.scatter_to_sequence_parallel_region,
    "reduce-scatter along the sequence": mappings.reduce_scatter_to_sequence_parallel_region,
    "gather": mappings.gather_from_tensor_model_parallel_region,
    "all-reduce": mappings.reduce_from_tensor_model_parallel_region,
    "keep a shard for recompute": split_tensor_into_1d_equal_chunks,
}
"""Functions that take Megatron's own TP group if they get none."""


@requires_world_size(2)
@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_an_exchange_without_a_group_fails(exchange):
    """There is no other group that it could take in silence."""
    Utils.initialize_distributed()
    with pytest.raises((AssertionError, AttributeError), match="group|NoneType"):
        exchange(torch.ones(2, 2, device=Utils.device, requires_grad=True) * 1)
