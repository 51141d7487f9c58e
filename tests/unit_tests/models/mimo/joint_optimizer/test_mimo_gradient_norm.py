# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Verdict, norm and clipping of gradients that have other types, or lie elsewhere."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.models.mimo.joint_optimizer import gradients, optimizer
from megatron.core.optimizer import clip_grads
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import requires_world_size


@pytest.mark.parametrize(("is_aware", "name"), [(False, "grad"), (True, "decoupled_grad")])
def test_a_bad_gradient_of_a_repeated_parameter_is_found_wherever_it_is_kept(is_aware, name):
    """The precision-aware optimizer has gradients of other types than its parameters."""
    parameter = torch.nn.Parameter(torch.ones(2))
    leaf = SimpleNamespace(
        prepare_grads=lambda: False,
        get_parameters=lambda: [parameter],
        tp_group=SimpleNamespace(rank=lambda: 1),
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=is_aware),
    )
    setattr(parameter, name, torch.ones(2))
    assert not gradients.unscale(leaf)
    setattr(parameter, name, torch.tensor([1, torch.nan]))
    assert gradients.unscale(leaf)


def norm_in_the_type_of_the_first(_chunk, _overflow, lists, _per_tensor):
    """Read gradients as Transformer Engine's kernel does."""
    read = [each.view(lists[0][0].dtype)[: len(each)].float() for each in lists[0]]
    return torch.cat(read).norm().view(1), None


@requires_world_size(1)
def test_it_is_that_of_gradients_of_several_types(monkeypatch):
    """Mamba-2's rates are fp32 in a model in bfloat16."""
    found = [torch.full((4,), 2.0, dtype=torch.bfloat16), torch.full((3,), 1 / 3)]
    leaf = SimpleNamespace(
        get_grads_for_grad_norm=lambda: found, get_grad_stats_parallel_group=lambda: None
    )
    monkeypatch.setattr(clip_grads, "l2_norm_impl", norm_in_the_type_of_the_first)
    with trainer():  # for its process groups
        square = gradients.square(leaf)
    assert square.item() == pytest.approx(16 + 1 / 3, rel=1e-6)


@requires_world_size(1)
def test_gradients_of_several_types_are_clipped_type_by_type(monkeypatch):
    types, mixed = [], [torch.ones(2, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    monkeypatch.setattr(optimizer, "gradients_of", lambda _: [(None, each) for each in mixed])
    monkeypatch.setattr(
        optimizer, "clip", lambda found, *_: types.append({each.dtype for each in found})
    )
    with trainer() as run:
        run.train_step()
    assert types == [{torch.bfloat16}, {torch.float32}]
