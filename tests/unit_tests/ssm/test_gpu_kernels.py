# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Modules that call GPU packages: found, left out, or refused with what is installed."""

import importlib.util
import sys
from types import ModuleType

import pytest

from megatron.core.ssm.state_passing.gpu_kernels import gpu_kernels

NAME = "megatron.core.ssm.state_passing.gated_delta_kernels"


@pytest.fixture
def install(monkeypatch):
    """Make it look as if only the given packages were installed."""

    def installed(**versions):
        for package, version in versions.items():
            module = ModuleType(package)
            module.__version__ = version
            monkeypatch.setitem(sys.modules, package, module)
        monkeypatch.setattr(importlib.util, "find_spec", versions.get)
        monkeypatch.setitem(sys.modules, NAME, ModuleType(NAME))

    gpu_kernels.cache_clear()
    yield installed
    gpu_kernels.cache_clear()


def test_a_module_whose_packages_are_there_is_given(install):
    install(fla="0.4.2")
    assert gpu_kernels("gated_delta_kernels").__name__ == NAME


def test_a_module_lacks_where_one_of_its_packages_does(install):
    install(mamba_ssm="2.3.1")
    assert gpu_kernels("mamba_kernels") is None


@pytest.mark.parametrize("version", ["0.5.0", "0.40.1"])
def test_another_version_of_private_kernels_is_refused(install, version):
    install(fla=version)
    with pytest.raises(ImportError, match=f"private kernels of fla 0.4, not {version}"):
        gpu_kernels("gated_delta_kernels")
