# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what upstream's tests need and CPU ranks lack: CUDA, NCCL, Python 3.12."""

import importlib.util
import sys
import types
import typing
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typing_extensions


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
    # Without TE, CLIP's norm is PyTorch's by default, which takes no config.
    norm = import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    vit = import_module("megatron.core.models.vision.clip_vit_model").CLIPViTModel
    init = vit.__init__
    init.__defaults__ = tuple(norm if d is torch.nn.LayerNorm else d for d in init.__defaults__)
