# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The data that is shown of a layout: groups of ranks, the bridge, and the timeline of a step.

Groups are read from the grids that training makes its process groups from, and the timeline is the
planner's.
"""

from dataclasses import dataclass
from functools import cached_property

from examples.mimo.common.layout import Layout, Layouts
from examples.mimo.nemotron_vlm.planner.machine import Machine
from examples.mimo.nemotron_vlm.planner.plan import Plan
from examples.mimo.nemotron_vlm.planner.schedule import Span, stages_of_pipeline, timeline
from examples.mimo.nemotron_vlm.planner.step_time import work_of
from layout_view.bridge import Bridge, colocated_bridge, non_colocated_bridge
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
class Module:
    """A module on its ranks."""

    name: str
    layout: Layout
    grid: HyperCommGrid

    @cached_property
    def groups(self) -> dict[str, list[list[int]]]:
        """All groups of ranks along each axis: equally many ranks, in the axis's order."""
        dense, experts, enumerate_ranks = DENSE_FIELDS, EXPERT_FIELDS, self.grid.get_rank_enum
        return {
            axis: enumerate_ranks(experts[axis], view=EXPERT_VIEW)
            if axis in experts
            else enumerate_ranks(dense[axis])
            for axis in AXES[self.name]
        }

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of ranks of a group of each axis."""
        return {axis: len(groups[0]) for axis, groups in self.groups.items()}

    @cached_property
    def index(self) -> dict[str, dict[int, int]]:
        """Index of each rank along each axis."""
        return {
            axis: {rank: place for group in groups for place, rank in enumerate(group)}
            for axis, groups in self.groups.items()
        }


@dataclass(frozen=True)
class View:
    """A plan on nodes of a machine; WORLD_SIZE in the environment must cover all its ranks."""

    plan: Plan
    machine: Machine

    @property
    def layouts(self) -> Layouts:
        """The plan's layouts."""
        return self.plan.layouts

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.layouts.language_offset + self.layouts.language.size

    @cached_property
    def modules(self) -> tuple[Module, Module]:
        """Encoder and language model."""
        e, lay = self.layouts.encoder, self.layouts.language
        grids = make_grid(e, "none"), make_grid(lay, "none", self.layouts.language_offset)
        return Module(ENCODER, e, grids[0]), Module(LANGUAGE, lay, grids[1])

    @property
    def rows_per_sample(self) -> float:
        """Number of embeddings of each sample."""
        (encoder,) = self.plan.preset.encoders
        return self.plan.inputs_of(encoder).mean * self.plan.mean_of(encoder).rows

    @cached_property
    def bridge(self) -> Bridge:
        """Rows exchanged between the modules in a step."""
        make = non_colocated_bridge if self.layouts.non_colocated else colocated_bridge
        rows = self.layouts.batch.global_size * self.rows_per_sample
        return make(*(module.grid for module in self.modules), rows)

    @property
    def split_axes(self) -> list[tuple[Module, str]]:
        """Axes with several ranks in a group, with their module."""
        both = self.modules
        return [(each, axis) for each in both for axis, size in each.sizes.items() if size > 1]

    def leaving(self, groups: list[list[int]]) -> list[list[int]]:
        """Return the groups that have ranks on several nodes."""
        size = self.machine.gpus_per_node
        return [group for group in groups if len({rank // size for rank in group}) > 1]

    @cached_property
    def timeline(self) -> dict[str, list[Span]]:
        """Spans of a rank of each pipeline stage, by the stage's name."""
        names = [stage.name for stage in stages_of_pipeline(self.layouts)]
        return dict(zip(names, timeline(work_of(self.plan, self.machine)), strict=True))

    @property
    def total(self) -> float:
        """Seconds of the step, up to the end of the backward."""
        return max(spans[-1][2] for spans in self.timeline.values())

    @property
    def bubble(self) -> float:
        """Share of the ranks' time that they spend waiting."""
        stages = stages_of_pipeline(self.layouts)
        busy = sum(
            stage.ranks * sum(end - begin for _, begin, end in spans)
            for stage, spans in zip(stages, self.timeline.values(), strict=True)
        )
        return max(0.0, 1 - busy / self.world / self.total)

    def describe_timeline(self) -> str:
        """Return the microbatches, the predicted seconds, and the share of waiting."""
        where = ", encoder in the bubbles" * self.plan.schedule.in_bubbles
        return (
            f"timeline{where}: {self.layouts.num_microbatches} microbatches, {self.total:.3g} s "
            f"before gradients are reduced, bubble {self.bubble:.1%}"
        )
