# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine alone serves where APEX is absent."""

import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType

import pytest

import megatron.core.optimizer.clip_grads
import megatron.core.tensor_parallel  # noqa: F401


def imported_anew(name: str) -> ModuleType:
    """A module as the first import makes it; the one that is in use stays."""
    spec = find_spec(name)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def engine(monkeypatch) -> ModuleType:
    """A stand-in for all of Transformer Engine, which has what a test gives it."""
    module = ModuleType("transformer_engine")
    for part in ("", ".pytorch", ".pytorch.cpp_extensions", ".pytorch.optimizers"):
        monkeypatch.setitem(sys.modules, module.__name__ + part, module)
    return module


def test_layers_take_transformer_engines_gemm_without_apex(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", None)
    weight_gradient = "megatron.core.tensor_parallel.weight_gradient"
    monkeypatch.delitem(sys.modules, weight_gradient, raising=False)
    engine.general_gemm = print
    assert imported_anew("megatron.core.tensor_parallel.layers")._grad_accum_fusion_available
    monkeypatch.delitem(sys.modules, weight_gradient)  # made with the stand-in


def test_the_norm_takes_transformer_engines_kernels_though_one_is_missing(engine):
    """Version 2.10 has no multi_tensor_scale_tensor."""
    engine.multi_tensor_applier = engine.multi_tensor_scale = engine.multi_tensor_l2norm = print
    clip_grads = imported_anew("megatron.core.optimizer.clip_grads")
    assert clip_grads.l2_norm_impl is print
    assert clip_grads.multi_tensor_scale_tensor_impl is None
