# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Modules that call GPU packages: found, left out, or refused with what is installed."""

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron.core.ssm.state_passing.gpu_kernels import VERSIONS, gpu_kernels

NAME = "megatron.core.ssm.state_passing.gated_delta.kernels"


def test_versions_are_those_that_the_extra_gpu_installs():
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    extra = map(Requirement, project["project"]["optional-dependencies"]["gpu"])
    installed = {wanted.name: wanted.specifier for wanted in extra}
    for package, version in VERSIONS.items():
        name = "flash-linear-attention" if package == "fla" else package.replace("_", "-")
        assert SpecifierSet(version) == installed[name], package


@pytest.fixture
def found(monkeypatch):
    """Return what is given for a kind of kernels where only the given packages are installed."""

    def found(kernels: str, **versions: str):
        for package, version in versions.items():
            module = ModuleType(package)
            module.__version__ = version
            monkeypatch.setitem(sys.modules, package, module)
        monkeypatch.setattr(importlib.util, "find_spec", versions.get)
        monkeypatch.setitem(sys.modules, NAME, ModuleType(NAME))
        return gpu_kernels(kernels)

    gpu_kernels.cache_clear()
    yield found
    gpu_kernels.cache_clear()


def test_a_module_is_given_whose_packages_are_all_there(found):
    assert found("gated_delta.kernels", fla="0.4.2").__name__ == NAME
    assert found("mamba.kernels", mamba_ssm="2.3.1") is None


@pytest.mark.parametrize("version", ["0.4.1", "0.5.0"])
def test_another_version_is_refused(found, version):
    with pytest.raises(ImportError, match=f"needs fla >=0.4.2,<0.5 on GPUs, found {version}"):
        found("gated_delta.kernels", fla=version)
