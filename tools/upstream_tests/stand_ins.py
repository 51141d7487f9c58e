# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what upstream's tests need and CPU ranks lack: CUDA, NCCL, TE, Python 3.12."""

import importlib.util
import inspect
import sys
import types
import typing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typing_extensions

LAYERS = "megatron.core.models"
LOCAL = {
    f"{LAYERS}.gpt.gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec": (
        f"{LAYERS}.gpt.gpt_layer_specs.get_gpt_layer_local_spec"
    ),
    f"{LAYERS}.gpt.gpt_layer_specs.get_gpt_layer_with_transformer_engine_submodules": (
        f"{LAYERS}.gpt.gpt_layer_specs.get_gpt_layer_local_submodules"
    ),
    f"{LAYERS}.vision.vit_layer_specs.get_vit_layer_with_transformer_engine_spec": (
        f"{LAYERS}.vision.vit_layer_specs.get_vit_layer_with_local_spec"
    ),
    "megatron.core.extensions.transformer_engine.TEColumnParallelLinear": (
        "megatron.core.tensor_parallel.ColumnParallelLinear"
    ),
    "megatron.core.extensions.transformer_engine.TERowParallelLinear": (
        "megatron.core.tensor_parallel.RowParallelLinear"
    ),
}
"""Transformer Engine's layers, which need a GPU, and Megatron's own that replace them."""


def install(cpu_runtime: Path) -> None:
    """Install our CPU runtime and the stand-ins, before tests are imported."""
    typing.override = typing_extensions.override
    # Under its usual name, which a pristine tree does not have.
    name = "megatron.core.cpu_runtime"
    spec = importlib.util.spec_from_file_location(name, cpu_runtime / "__init__.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    sys.modules[name].install()
    # Upstream's conftest downloads test data, and some tests ask for ModelOpt to get transformers.
    downloads = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    downloads.download_and_extract_asset = lambda assets_dir: False
    sys.modules[downloads.__name__] = downloads
    skip = pytest.importorskip
    pytest.importorskip = lambda name, *a, **k: None if name == "modelopt" else skip(name, *a, **k)
    for engines, ours in LOCAL.items():
        (home, name), (where, local) = engines.rsplit(".", 1), ours.rsplit(".", 1)
        setattr(import_module(home), name, _with_globals(getattr(import_module(where), local)))
    # Without TE, CLIP's norm is PyTorch's by default, which takes no config.
    norm = import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    init = import_module(f"{LAYERS}.vision.clip_vit_model").CLIPViTModel.__init__
    init.__defaults__ = tuple(norm if d is torch.nn.LayerNorm else d for d in init.__defaults__)


def _with_globals(local: Any) -> Any:
    """Wrap a class or a function to initialize the globals that it, unlike TE's, relies on."""
    if isinstance(local, type):

        def init(self, *args, **options):
            _initialize_globals()
            local.__init__(self, *args, **options)

        return type(local.__name__, (local,), {"__init__": init})
    known = inspect.signature(local).parameters  # options that only TE's layers have are dropped

    def layers(*args, **options):
        _initialize_globals()
        return local(*args, **{name: value for name, value in options.items() if name in known})

    return layers


def _initialize_globals() -> None:
    parallel_state = import_module("megatron.core.parallel_state")
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    random = import_module("megatron.core.tensor_parallel.random")
    if not random.get_cuda_rng_tracker().is_initialized():
        random.model_parallel_cuda_manual_seed(1234, tp_rank=0, ep_rank=0, etp_rank=0)
