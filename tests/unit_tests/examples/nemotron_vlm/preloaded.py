# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Imports that take a program seconds at its start: processes forked after them start quickly.

They are made where there is no CPU runtime yet: programs install it.
"""

import atexit
import gc
from argparse import ArgumentParser

import scipy.optimize  # noqa: F401 (the bridge's plan would import it in each rank)
import scipy.sparse.csgraph  # noqa: F401

import examples.mimo.nemotron_vlm.loop.run  # noqa: F401
from examples.mimo.nemotron_vlm.data.digits import load_scans
from megatron.training import argument_utils
from megatron.training.arguments import add_megatron_arguments

_read = argument_utils.ArgumentGroupFactory._get_field_docstrings
_texts: dict[type, dict[str, str]] = {}


def _read_once(factory: argument_utils.ArgumentGroupFactory, config: type) -> dict[str, str]:
    if config not in _texts:
        _texts[config] = _read(factory, config)
    return _texts[config]


# Megatron's parser parses the sources of its configurations for their help.
argument_utils.ArgumentGroupFactory._get_field_docstrings = _read_once
add_megatron_arguments(ArgumentParser())
load_scans()
gc.collect()
atexit.register(gc.unfreeze)  # Triton's bindings would report what is left
gc.freeze()  # a forked process frees its model quickly then
