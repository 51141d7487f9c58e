# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of the rows of Hugging Face tensors that make up each of ours, read both ways.

All differences between the two formats are of this kind: a tensor under another name, several
concatenated, one split, or, for attention, the rows of heads interleaved. Rows are along a tensor's
first dim.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.encoders.hugging_face import Table

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """Rows of a Hugging Face tensor, and their place in one of ours."""

    ours: str
    our_start: int
    theirs: str
    their_start: int
    count: int


class Translation:
    """A table whose slices have sizes.

    of_ours, of_theirs: slices of each tensor, in the order of its rows. shapes: shapes of theirs.

    Args:
        table: has all names of ``shapes``, and no other.
        shapes: shapes of our tensors, by name.
    """

    def __init__(self, table: Table, shapes: Mapping[str, Shape]) -> None:
        assert table.keys() == shapes.keys(), table.keys() ^ shapes.keys()
        self.of_ours: dict[str, list[Slice]] = defaultdict(list)
        self.of_theirs: dict[str, list[Slice]] = defaultdict(list)
        self.shapes: dict[str, Shape] = {}
        for ours, sources in table.items():
            at = 0
            for rows in sources:
                count = shapes[ours][0] if rows.count is None else rows.count
                each = Slice(ours, at, rows.name, rows.start, count)
                self.of_ours[ours].append(each)
                self.of_theirs[rows.name].append(each)
                at += count
            assert at == shapes[ours][0], (ours, at, shapes[ours])
        for name, slices in self.of_theirs.items():
            slices.sort(key=lambda each: each.their_start)
            end = 0
            for each in slices:
                assert each.their_start == end, (name, each)
                end += each.count
            self.shapes[name] = (end, *shapes[slices[0].ours][1:])

    def join(self, name: str, read: Callable[[str, int, int], torch.Tensor]) -> torch.Tensor:
        """Make a tensor of ours; ``read`` takes one of their names, a first row, and a count."""
        slices = self.of_ours[name]
        return _joined([read(p.theirs, p.their_start, p.count) for p in slices])

    def split(self, name: str, ours: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Make a tensor of theirs from those of ours that hold its slices."""
        slices = self.of_theirs[name]
        return _joined([ours[p.ours].narrow(0, p.our_start, p.count) for p in slices])


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def differences(wanted: Mapping[str, Shape], found: Mapping[str, Shape], where: Path) -> list[str]:
    """Return a line for every tensor that is missing, surplus or has another shape."""
    lines = [f"missing: {name} {list(wanted[name])}" for name in wanted if name not in found]
    lines += [f"surplus: {name} {list(found[name])}" for name in found if name not in wanted]
    lines += [
        f"misshapen: {name} {list(found[name])}, wanted {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    return [f"{where}: {line}" for line in lines]


def refuse(lines: list[str]) -> None:
    """Raise UserError with the lines, if there are any."""
    if lines:
        raise UserError("the tensors do not fit\n  " + "\n  ".join(lines))
