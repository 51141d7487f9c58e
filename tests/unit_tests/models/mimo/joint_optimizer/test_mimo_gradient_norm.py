# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The gradient norm counts each element of the model once, however TP, EP and ETP share it."""

import functools
from types import SimpleNamespace

import pytest
import torch

from megatron.core.models.mimo.joint_optimizer import gradients, leaf, optimizer
from megatron.core.optimizer import clip_grads
from tests.unit_tests.examples.nemotron_vlm.runs import SMALL, Trainer, trainer
from tests.unit_tests.test_utilities import requires_world_size


def norm_of_ones(run: Trainer) -> float:
    """Take a step in which every element of every gradient is one."""
    launch = run.optimizer.launch

    def launch_with_ones() -> None:
        for stage in run.stages:
            for parameter in stage.parameters():
                parameter.main_grad.fill_(1)
        launch()

    run.optimizer.launch = launch_with_ones
    record = run.train_step()
    assert not record["skipped"]
    return record["grad_norm"]


@functools.cache
def elements(*options: str) -> int:
    """Number of elements of the model, which every rank holds whole."""
    with trainer(*SMALL, "--encoder", "dp=4", "--language", "dp=4", *options) as run:
        return sum(p.numel() for stage in run.stages for p in stage.parameters())


@requires_world_size(4)
@pytest.mark.parametrize(
    ("language", "marked", "options"),
    [
        ("tp=2,dp=2,ep=4,etp=1", True, ()),
        ("tp=2,dp=2,ep=4,etp=1", False, ()),
        ("tp=2,cp=2,dp=1,ep=2,etp=1", False, ("--no-use-distributed-optimizer",)),
        ("tp=2,pp=2,dp=1,ep=2,etp=1", True, ("--no-untie-embeddings-and-output-weights",)),
    ],
)
def test_it_is_the_root_of_the_number_of_elements(language, marked, options, monkeypatch):
    """Also where layers leave weights of whole experts unmarked, which TP ranks do not share then:
    those of Transformer Engine's grouped GEMM were."""
    make = leaf.get_megatron_optimizer

    def unmarked(config, stages, *args, **more):
        for parameter in (p for stage in stages for p in stage.parameters()):
            if not getattr(parameter, "allreduce", True):
                parameter.tensor_model_parallel = marked
        return make(config, stages, *args, **more)

    whole = elements(*options)
    monkeypatch.setattr(leaf, "get_megatron_optimizer", unmarked)
    with trainer(*SMALL, "--encoder", "tp=2,dp=2", "--language", language, *options) as run:
        assert norm_of_ones(run) == pytest.approx(whole**0.5, rel=1e-6)


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
