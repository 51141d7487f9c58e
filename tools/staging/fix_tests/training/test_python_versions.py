# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""megatron.training imports names from where every Python that it runs on has them."""

import ast
from pathlib import Path

import megatron.core

MODELS = Path(megatron.core.__path__[0]).parent / "training" / "models"


def test_override_comes_from_typing_extensions():
    """`typing` has it since Python 3.12."""
    sources = {
        node.module
        for path in MODELS.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and "override" in [name.name for name in node.names]
    }
    assert sources == {"typing_extensions"}
