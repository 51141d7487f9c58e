# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what upstream's tests need and CPU ranks lack: CUDA, NCCL, TE, Python 3.12."""

import importlib.util
import inspect
import os
import sys
import types
import typing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typing_extensions

_GPT, _VIT = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.vision.vit_layer_specs",
)
_LOCAL_LAYERS = {
    "get_gpt_layer_with_transformer_engine_spec": (_GPT, "get_gpt_layer_local_spec"),
    "get_gpt_layer_with_transformer_engine_submodules": (_GPT, "get_gpt_layer_local_submodules"),
    "get_vit_layer_with_transformer_engine_spec": (_VIT, "get_vit_layer_with_local_spec"),
    "TEColumnParallelLinear": ("megatron.core.tensor_parallel", "ColumnParallelLinear"),
    "TERowParallelLinear": ("megatron.core.tensor_parallel", "RowParallelLinear"),
}
"""Transformer Engine's layers, which need a GPU, and Megatron's own that replace them, by name."""


def install() -> None:
    """Install the CPU runtime and the stand-ins that must precede the import of Megatron."""
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = typing_extensions.override
    _install_cpu_runtime()
    _without_downloads()
    _without_modelopt()


def _install_cpu_runtime() -> None:
    """Load the runtime from our overlay, under its usual name: a pristine tree does not have it."""
    name = "megatron.core.cpu_runtime"
    folder = Path(os.environ["UPSTREAM_TESTS_CPU_RUNTIME"])
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    sys.modules[name].install()


def _without_downloads() -> None:
    """Replace the module with which upstream's conftest downloads test data."""
    module = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    module.download_and_extract_asset = lambda assets_dir: False
    sys.modules[module.__name__] = module


def _without_modelopt() -> None:
    """Let tests run that require ModelOpt only to ensure a recent `transformers`."""
    importorskip = pytest.importorskip

    def without_modelopt(modname, *args, **kwargs):
        return None if modname == "modelopt" else importorskip(modname, *args, **kwargs)

    pytest.importorskip = without_modelopt


def give_tests_local_layers(collected: set[types.ModuleType]) -> None:
    """Replace TE's layers by Megatron's own in test modules and examples.

    `collected` are the modules that pytest imported by path. Megatron's own modules are not
    changed: the library's own use of TE still fails.
    """
    imported = {m for name, m in sys.modules.items() if name.startswith(("tests.", "examples."))}
    for name, (home, local) in _LOCAL_LAYERS.items():
        callers = [module for module in collected | imported if hasattr(module, name)]
        if callers:
            stand_in = _with_globals(getattr(import_module(home), local))
            for module in callers:
                setattr(module, name, stand_in)
    _give_clip_a_norm()


def _give_clip_a_norm() -> None:
    """Give CLIP a norm: without TE, its default is PyTorch's, which takes no config."""
    clip = sys.modules.get("megatron.core.models.vision.clip_vit_model")
    if clip is not None:
        norm = import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
        init = clip.CLIPViTModel.__init__
        init.__defaults__ = tuple(
            norm if default is torch.nn.LayerNorm else default for default in init.__defaults__
        )


def _with_globals(local: Any) -> Any:
    """Wrap `local`, a class or a function, to initialize the globals that it relies on."""
    if isinstance(local, type):

        def init(self, *args, **options):
            _initialize_globals()
            local.__init__(self, *args, **options)

        return type(local.__name__, (local,), {"__init__": init})
    # Options that only TE's layers have are dropped.
    known = inspect.signature(import_module(_GPT).get_gpt_layer_local_submodules).parameters

    def layers(*args, **options):
        _initialize_globals()
        return local(*args, **{name: value for name, value in options.items() if name in known})

    return layers


def _initialize_globals() -> None:
    """Initialize the random states and the buffer that Megatron's own layers, unlike TE's, need."""
    parallel_state = import_module("megatron.core.parallel_state")
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    random = import_module("megatron.core.tensor_parallel.random")
    if not random.get_cuda_rng_tracker().is_initialized():
        random.model_parallel_cuda_manual_seed(1234, tp_rank=0, ep_rank=0, etp_rank=0)
