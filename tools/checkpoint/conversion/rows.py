# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of the rows of Hugging Face tensors that make up each of ours, read both ways.

All differences between the two formats are of this kind: a tensor under another name, several
concatenated, one split, or, for attention, the rows of heads interleaved. Rows are along a tensor's
first dim.
"""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from conversion.nemotron_h import LanguagePart
from conversion.torch_dist import saved_key
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.encoders.hugging_face import Part
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options.on_meta import stages_on_meta
from examples.mimo.nemotron_vlm.options.run import Run
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

Shape = tuple[int, ...]

LANGUAGE = LanguagePart("language", "language_model.", "language_model.", "text_config")


@dataclass(frozen=True)
class Slice:
    """Rows of a Hugging Face tensor, and their place in one of ours."""

    ours: str
    our_start: int
    theirs: str
    their_start: int
    count: int


class Translation:
    """The table of a whole model, whose slices have sizes.

    parts: our tensors without data, by name. A key in a checkpoint may hold several, numbered by
    leading dims: experts, or an encoder's layers. A name is the key, followed by the number.
    of_ours, of_theirs: slices of each tensor, in the order of its rows. shapes: shapes of theirs.
    """

    def __init__(self, preset: VLMPreset) -> None:
        self.parts, _ = program_parts(preset)
        self.of_ours: dict[str, list[Slice]] = defaultdict(list)
        self.of_theirs: dict[str, list[Slice]] = defaultdict(list)
        self.shapes: dict[str, Shape] = {}
        for part, sizes in parts_of(preset):
            for name, sources in part.table(sizes).items():
                ours, at = saved_key(part.ours + name), 0
                rows_of_ours = self.parts[ours].local_shape[0]
                for rows in sources:
                    count = rows_of_ours if rows.count is None else rows.count
                    each = Slice(ours, at, part.theirs + rows.name, rows.start, count)
                    self.of_ours[ours].append(each)
                    self.of_theirs[each.theirs].append(each)
                    at += count
                assert at == rows_of_ours, (ours, at, rows_of_ours)
        assert self.of_ours.keys() == self.parts.keys(), self.of_ours.keys() ^ self.parts.keys()
        for name, slices in self.of_theirs.items():
            slices.sort(key=lambda each: each.their_start)
            end = 0
            for each in slices:
                assert each.their_start == end, (name, each)
                end += each.count
            self.shapes[name] = (end, *self.parts[slices[0].ours].local_shape[1:])


def rows_of(slices: Iterable[Slice], ours: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Make a tensor of theirs from our tensors, which hold its slices."""
    return torch.cat([ours[each.ours].narrow(0, each.our_start, each.count) for each in slices])


def parts_of(preset: VLMPreset) -> list[tuple[Part, Any]]:
    """Return the parts of a model, each with the entry that has its sizes."""
    encoders = [(part, entry) for entry in preset.encoders for part in entry.parts()]
    return [(LANGUAGE, preset.language), *encoders]


def program_parts(preset: VLMPreset, *words: str) -> tuple[dict[str, ShardedTensor], Namespace]:
    """Return the tensors of the program's own model, and the options of its run.

    The model is made on the meta device by one rank alone.

    Args:
        words: options of adapters.
    """
    with redirect_stdout(None):
        run = Run.of(["--transformer-impl", "local", *words], 1, preset)
        with stages_on_meta(run, 0) as (model,):
            state = model.sharded_state_dict()
    apply_factories(state)
    parts = {}
    for part in nested_values(state):
        if isinstance(part, ShardedTensor):
            part = replace(part, key=saved_key(part.key))
            numbers = part.global_offset[: part.prepend_axis_num]
            parts[part.key + "".join(f"[{number}]" for number in numbers)] = part
    return parts, run.args


def check_tensors(wanted: Mapping[str, Shape], found: Mapping[str, Shape], where: Path) -> None:
    """Check that the tensors of ``where`` are those that are wanted.

    Raises:
        UserError: there are none, or some are missing, surplus or have another shape; a line of the
            message for each.
    """
    if not found:
        raise UserError(f"{where}: no tensors of the model, which .safetensors files have")
    lines = [f"missing: {name} {list(wanted[name])}" for name in wanted if name not in found]
    lines += [f"surplus: {name} {list(found[name])}" for name in found if name not in wanted]
    lines += [
        f"misshapen: {name} {list(found[name])}, wanted {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if lines:
        raise UserError("\n  ".join(["the tensors do not fit", *(f"{where}: {x}" for x in lines)]))
