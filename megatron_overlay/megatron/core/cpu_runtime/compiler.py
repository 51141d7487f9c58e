# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""PyTorch without its compiler, which takes seconds to import and compiles nothing on CPU ranks."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import torch

NAME = "torch._dynamo"


def eager(model: Callable | None = None, *_, **__) -> Callable:
    """Stand-in for `torch.compile` and its opposite: return the function, or itself without one."""
    return model if model is not None else eager


class _Absent(ModuleType):
    """In the compiler's place: PyTorch's optimizers ask it to leave functions as they are, and its
    groups to forget rules. Whoever asks for more gets the compiler itself."""

    disable = staticmethod(eager)
    graph_break = staticmethod(lambda *_, **__: None)
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__path__":  # which importing a part of it asks for
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)


def leave_out() -> None:
    """Keep the compiler from being imported, or from compiling where it is there already."""
    if NAME in sys.modules:  # functions may already be decorated with torch.compile
        torch.compiler.set_stance("force_eager")
    else:
        sys.modules[NAME] = torch._dynamo = _Absent(NAME)
