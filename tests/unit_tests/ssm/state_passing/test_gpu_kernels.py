# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Modules that call GPU packages are refused with another version than the extra ``gpu`` has."""

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron.core.ssm.state_passing.gpu_kernels import VERSIONS, gpu_kernels


def test_versions_are_those_that_the_extra_gpu_installs():
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    extra = map(Requirement, project["project"]["optional-dependencies"]["gpu"])
    installed = {wanted.name: wanted.specifier for wanted in extra}
    for package, version in VERSIONS.items():
        name = "flash-linear-attention" if package == "fla" else package.replace("_", "-")
        assert SpecifierSet(version) == installed[name], package


@pytest.mark.parametrize("version", ["0.4.1", "0.5.0"])
def test_another_version_is_refused(version, monkeypatch):
    module = ModuleType("fla")
    module.__version__ = version
    monkeypatch.setitem(sys.modules, "fla", module)
    monkeypatch.setattr(importlib.util, "find_spec", {"fla": version}.get)
    gpu_kernels.cache_clear()
    with pytest.raises(ImportError, match=f"needs fla >=0.4.2,<0.5 on GPUs, found {version}"):
        gpu_kernels("gated_delta.kernels")
