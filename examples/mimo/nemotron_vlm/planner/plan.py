# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A task is the run to plan; a plan is one way to run it, with checked layouts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from examples.mimo.common.layout import PLACEMENTS, Layout, Layouts
from examples.mimo.nemotron_vlm.model.adapters import Adapters
from examples.mimo.nemotron_vlm.model.part_settings import ModelPart
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.planner.machine import Machine
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule

if TYPE_CHECKING:
    from examples.mimo.nemotron_vlm.planner.inputs import Inputs


class StateBytes(NamedTuple):
    """Bytes for each parameter: its gradient, and the optimizer's state of the rank's shard, on the
    GPU, on the host and in a checkpoint; and for each logit, None with Megatron's loss."""

    gradient: float = 4.0
    optimizer: float = 12.0
    on_host: float = 0.0
    saved: float = 12.0
    logit: float | None = None


@dataclass(frozen=True, eq=False)
class Task:
    """The run to plan."""

    preset: VLMPreset
    world: int  # number of GPUs
    machine: Machine  # their figures
    seq_length: int
    global_batch: int
    inputs: tuple[Inputs, ...]  # of each encoder, in the preset's order
    operations: float = 0.0  # of a row's forward and backward, for the reported throughput
    placements: tuple[str, ...] = PLACEMENTS  # that may be chosen
    micro_sizes: tuple[int, ...] = (1, 2, 4, 8)  # that may be chosen
    state: StateBytes = StateBytes()
    frozen: frozenset[ModelPart] = frozenset()
    adapters: Adapters | None = None
    words: tuple[str, ...] = ()  # the command line

    @property
    def inert(self) -> frozenset[ModelPart]:
        """Frozen parts without adapters."""
        return self.frozen - (self.adapters.parts if self.adapters else frozenset())


class Stage(NamedTuple):
    """A stage of the pipeline.

    encoder: the encoder's place in the preset; None for the language model's stages. number: the
    stage's place in its module's own pipeline.
    """

    encoder: int | None
    number: int
    name: str


@dataclass(frozen=True)
class Plan:
    """One way to run a task."""

    task: Task
    layouts: Layouts
    recompute: str = "none"  # or moe (Megatron's selective recompute of MoE layers), or full
    schedule: EncoderSchedule = EncoderSchedule()  # of colocated encoders

    @property
    def encoded_at_once(self) -> int:
        """Microbatches whose inputs are encoded at once."""
        if self.layouts.non_colocated:
            return 1
        return self.schedule.at_once(self.layouts.language.pp, self.layouts.num_microbatches)

    @property
    def encoders(self) -> list[tuple[Inputs, Layout]]:
        """The inputs and the layout of each encoder."""
        return list(zip(self.task.inputs, self.layouts.encoders, strict=True))

    def rows(self, own: Layout) -> float:
        """Return the rows of a microbatch whose inputs an encoder's rank encodes."""
        return self.layouts.batch.micro_size * self.layouts.language.dp / own.dp


@cache
def stages_of_pipeline(layouts: Layouts) -> list[Stage]:
    """Return the pipeline's stages; those of encoders on ranks of their own come first."""
    stages = [
        Stage(place, number, f"encoder {place}, {number}")
        for place, lay in enumerate(layouts.encoders if layouts.non_colocated else ())
        for number in range(lay.pp)
    ]
    stages += [Stage(None, number, f"stage {number}") for number in range(layouts.language.pp)]
    return stages if len(stages) > 1 else [stages[0]._replace(name="all ranks")]
