# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Modules of a layout: their grids, and the groups of ranks along each axis.

Everything is read from the grids that training makes its process groups from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from examples.mimo.common.layout import Batch, Layout, Layouts, parse_layout
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options.layout_rules import ranks_of_modules, resolve
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.setup.module_groups import make_grid
from megatron.core.process_groups_from_grid import DENSE_FIELDS, EXPERT_FIELDS, EXPERT_VIEW

ENCODER, LANGUAGE = "encoder", "language"
AXES = {
    ENCODER: ("tp", "dp", "pp"),
    LANGUAGE: ("tp", "cp", "dp", "pp", "dp_cp", "ep", "expt_tp", "expt_dp"),
}
"""Fields of each module's process groups; gradients are reduced over ``dp_cp``."""


@dataclass(frozen=True)
class Axis:
    """All groups of ranks along one axis of a module, each in the axis's order.

    The groups have the same size.
    """

    name: str
    groups: list[list[int]]

    @property
    def size(self) -> int:
        """Number of ranks of a group."""
        return len(self.groups[0])

    @cached_property
    def index(self) -> dict[int, int]:
        """Index of each rank along the axis."""
        return {rank: place for group in self.groups for place, rank in enumerate(group)}

    def leaving(self, gpus_per_node: int) -> int:
        """Return the number of groups with ranks on several nodes."""
        return sum(leaves_node(group, gpus_per_node) for group in self.groups)


@dataclass(frozen=True)
class Module:
    """A module on its ranks."""

    name: str
    layout: Layout
    grid: HyperCommGrid

    @property
    def ranks(self) -> range:
        """Global ranks that hold the module."""
        return range(self.grid.rank_offset, self.grid.rank_offset + self.grid.size)

    @cached_property
    def axes(self) -> dict[str, Axis]:
        """Axes of the module, by name."""
        return {field: Axis(field, self._enumerate(field)) for field in AXES[self.name]}

    def _enumerate(self, field: str) -> list[list[int]]:
        if field in EXPERT_FIELDS:
            return self.grid.get_rank_enum(EXPERT_FIELDS[field], view=EXPERT_VIEW)
        return self.grid.get_rank_enum(DENSE_FIELDS[field])


def leaves_node(ranks: list[int], gpus_per_node: int) -> bool:
    """Return whether ranks lie on several nodes."""
    return len({rank // gpus_per_node for rank in ranks}) > 1


def read_layouts(
    encoder: str,
    language: str,
    world: int,
    preset: VLMPreset,
    placement: str,
    microbatches: int | None = None,
    micro_batch_size: int = 1,
    seq_length: int | None = None,
) -> Layouts:
    """Parse and check both layouts as the training program does.

    Args:
        encoder, language: as ``--encoder`` and ``--language`` take them.
        microbatches: number of microbatches of a step; by default two for each pipeline stage.
        seq_length: tokens of a sample; the preset's by default.

    Raises:
        UserError: a rule is broken; the message names the numbers, the rule, and the nearest
            layouts that would work.
    """
    asked = parse_layout(encoder, ENCODER), parse_layout(language, LANGUAGE)
    _, ranks = ranks_of_modules(*asked, world, placement)
    wanted = asked[1]
    dp = wanted.dp or max(1, ranks // (wanted.tp * wanted.cp * wanted.pp))
    number = microbatches or 2 * wanted.pp
    batch = Batch(number * micro_batch_size * dp, micro_batch_size, seq_length or preset.seq_length)
    return resolve(*asked, batch, world, preset, placement)


def modules_of(layouts: Layouts) -> tuple[Module, Module]:
    """Return encoder and language model; WORLD_SIZE in the environment must cover both grids."""
    return (
        Module(ENCODER, layouts.encoder, make_grid(layouts.encoder, "none")),
        Module(
            LANGUAGE,
            layouts.language,
            make_grid(layouts.language, "none", layouts.language_offset),
        ),
    )
