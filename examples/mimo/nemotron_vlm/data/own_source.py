# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Data sets of a class that the user wrote, and the parameters that ``--data`` gives them."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data.sample import SampleSource

TRUTH = {"true": True, "false": False}
READERS = {bool: TRUTH.__getitem__, int: int, float: float, Path: Path}
"""Readers of a parameter's text, by its type; other types take the text."""


def parameters_of(kind: type[SampleSource]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class, by name."""
    return inspect.signature(kind, eval_str=True).parameters


def build(kind: type[SampleSource], data: str, given: Mapping[str, Any]) -> SampleSource:
    """Build the source that ``--data NAME:key=value,…`` asks for.

    Args:
        data: what ``--data`` has.
        given: what the program gives to the parameters of these names.

    Raises:
        UserError: a key is unknown or missing, or its value is not of the parameter's type.
    """
    parameters = parameters_of(kind)
    own = {name: each for name, each in parameters.items() if name not in given}
    texts = [word.partition("=") for word in data.partition(":")[2].split(",") if word]
    values = {name: given[name] for name in parameters if name in given}
    wrong = [f"no parameter {name}" for name, _, _ in texts if name not in own]
    for name, _, text in texts if not wrong else ():
        types = get_args(own[name].annotation) or (own[name].annotation,)
        read = next((READERS[each] for each in types if each in READERS), str)
        try:
            values[name] = read(text)
        except (ValueError, KeyError):
            wrong.append(f"{name}={text} is no {types[0].__name__}")
    wrong += [f"{n} is missing" for n in own if n not in values and own[n].default is own[n].empty]
    if wrong:
        takes = [str(each) for each in own.values()] or ["no parameters"]
        raise UserError(f"--data {data}: {wrong[0]}; {kind.__name__} takes {', '.join(takes)}")
    return kind(**values)
