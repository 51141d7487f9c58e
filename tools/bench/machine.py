# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The machine and the packages with which figures are measured."""

import platform
from importlib import metadata

import torch

PACKAGES = ("torch", "transformer_engine", "megatron-core", "mamba-ssm", "triton")


def machine() -> dict[str, object]:
    """Return the names of GPUs and processor, and the versions of installed packages."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    gpus = [f"{gpu.name}, {gpu.multi_processor_count} multiprocessors" for gpu in found]
    return {"gpus": gpus, "cpu": platform.processor(), "versions": versions}
