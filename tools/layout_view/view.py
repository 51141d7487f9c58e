# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The data that is shown of a layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from examples.mimo.common.layout import Layouts
from examples.mimo.nemotron_vlm.planner.schedule import Timeline, timeline
from layout_view.bridge import Bridge, colocated_bridge, non_colocated_bridge
from layout_view.modules import Module, leaves_node, modules_of


@dataclass(frozen=True)
class View:
    """A layout on nodes of some size.

    Attributes:
        rows_per_sample: number of embeddings of each sample.
        encoder_share: the encoder's part of a step in which no rank waits.
        in_bubbles, macro_batch: as in :func:`timeline`.
    """

    layouts: Layouts
    gpus_per_node: int
    rows_per_sample: int
    encoder_share: float
    in_bubbles: bool = False
    macro_batch: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.layouts.language_offset + self.layouts.language.size

    @cached_property
    def modules(self) -> tuple[Module, Module]:
        """Encoder and language model."""
        return modules_of(self.layouts)

    @cached_property
    def bridge(self) -> Bridge:
        """Rows exchanged between the modules in a step."""
        make = non_colocated_bridge if self.layouts.non_colocated else colocated_bridge
        return make(*self.modules, self.layouts.batch.global_size * self.rows_per_sample)

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of a step's schedule."""
        return timeline(self.layouts, self.encoder_share, self.in_bubbles, self.macro_batch)

    def node(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.gpus_per_node

    def coordinates(self, module: Module, rank: int) -> dict[str, int]:
        """Return a rank's index along each axis of a module; empty if the module is not on it."""
        if rank not in module.ranks:
            return {}
        return {name: axis.index[rank] for name, axis in module.axes.items()}

    def data(self) -> dict:
        """Return everything for JSON."""
        ways = {"forward": self.bridge.forward, "backward": self.bridge.backward}
        return {
            "world": self.world,
            "gpus_per_node": self.gpus_per_node,
            "placement": self.layouts.placement,
            "batch": asdict(self.layouts.batch),
            "modules": {
                module.name: {
                    "layout": asdict(module.layout),
                    "first_rank": module.ranks.start,
                    "coordinates": [self.coordinates(module, rank) for rank in module.ranks],
                    "axes": {
                        axis.name: {
                            "groups": axis.groups,
                            "leave_a_node": axis.leaving(self.gpus_per_node),
                        }
                        for axis in module.axes.values()
                    },
                }
                for module in self.modules
            },
            "bridge": {
                "blocks": self.bridge.blocks,
                "blocks_that_leave_a_node": self.blocks_leaving,
                "rows_per_sample": self.rows_per_sample,
            }
            | {
                name: {
                    "rows": way.total,
                    "sent": way.sent(self.world).tolist(),
                    "received": way.received(self.world).tolist(),
                    "share_that_leaves_a_node": way.leaving(self.gpus_per_node),
                }
                for name, way in ways.items()
            },
            "timeline": {
                "encoder_share": self.encoder_share,
                "microbatches": self.layouts.num_microbatches,
                "total": self.timeline.total,
                "bubble": self.timeline.bubble,
                "stages": dict(zip(self.timeline.names, self.timeline.stages, strict=True)),
            },
        }

    @property
    def blocks_leaving(self) -> int:
        """Number of blocks of the bridge with ranks on several nodes."""
        return sum(leaves_node(block, self.gpus_per_node) for block in self.bridge.blocks)
