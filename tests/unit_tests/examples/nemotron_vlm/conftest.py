# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several folders of the program's tests use."""

import pytest
import torch

from megatron.core.transformer import transformer_config


@pytest.fixture
def hopper(monkeypatch) -> None:
    """Options are parsed as on a Hopper GPU with a new Transformer Engine."""
    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
