# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Training scripts can be imported by Python 3.11, whose typing has no `override`."""

import typing
from importlib.util import find_spec, module_from_spec

import pytest


@pytest.mark.parametrize("name", ["gpt", "hybrid"])
def test_a_model_is_imported_without_typings_override(name, monkeypatch):
    monkeypatch.delattr(typing, "override", raising=False)
    spec = find_spec(f"megatron.training.models.{name}")
    spec.loader.exec_module(module_from_spec(spec))
