# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters that ranks hold, counted on the program's own model on the meta device.

A model of one layer of each kind is built once for each set of sizes, in less than a tenth of a
second; its parameters say whether tensor parallelism divides them, so what a rank of any layout
holds follows from them.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from examples.mimo.common.layout import Layout, Layouts
from examples.mimo.common.layout_rules import staged_pattern
from examples.mimo.nemotron_vlm.model.adapters import Adapters
from examples.mimo.nemotron_vlm.model.part_settings import LANGUAGE, ModelPart, part_of
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options.on_meta import stages_on_meta
from examples.mimo.nemotron_vlm.options.run import Run
from examples.mimo.nemotron_vlm.planner.plan import Stage, Task
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.transformer.lora import is_adapter

ENCODER, VIT_LAYER, PROJECTOR = "encoder", "vit layer", "projector"
FIRST, LAST, EXPERT = "embedding", "norm, output", "routed experts"
"""Kinds of places of parameters, beside the letters of the language model's layers."""


class Place(NamedTuple):
    """A place of parameters in the model.

    kind: an encoder's is ``VIT_LAYER``, ``ENCODER`` for what surrounds these, or ``PROJECTOR``. The
    language model's is the letter of a layer, ``EXPERT`` for its routed experts, or ``FIRST`` and
    ``LAST`` for what the first and the last stage of a pipeline have besides. is_divided: whether
    tensor parallelism divides the parameters.
    """

    part: ModelPart
    kind: str
    is_adapter: bool
    is_divided: bool


@cache
def chunks_of(pattern: str, layout: Layout) -> list[str]:
    """Return the layers of each virtual stage of the whole pipeline, in its order."""
    return (pattern if "|" in pattern else staged_pattern(pattern, layout)).split("|")


@cache
def held(task: Task, layouts: Layouts, stage: Stage, trained: bool = False) -> list[float]:
    """Return the parameters that a rank of a stage holds, or only those that it trains.

    They are those of each encoder with its projector, replicated over the encoder's dp; the
    language model's, replicated over its dp·cp; and its experts', replicated over ``expt_dp``.
    """
    preset, lay, numbers, options = task.preset, layouts.language, [], task.options
    left_out = options.parts.frozen if trained else ()
    counts = _one_of_each(preset, options.adapters).items()

    def count(module: str, tp: int, times: Mapping[str, float]) -> float:
        return sum(
            times.get(place.kind, 0.0) * number / (tp if place.is_divided else 1)
            for place, number in counts
            if place.part[0] == module and (place.is_adapter or place.part not in left_out)
        )

    for place, (each, own) in enumerate(zip(preset.encoders, layouts.encoders, strict=True)):
        at = 0 if stage.is_language else stage.number
        times = {VIT_LAYER: each.layers // own.pp, ENCODER: at == 0, PROJECTOR: at == own.pp - 1}
        numbers.append(count(each.name, own.tp, times) * (place in stage.encoders))
    chunks = chunks_of(preset.language.hybrid_layer_pattern, lay)[stage.number :: lay.pp]
    kinds, ends = Counter("".join(chunks) * stage.is_language), {}
    if stage.is_language:
        ends = {FIRST: stage.number == 0, LAST: stage.number == lay.pp - 1}
    experts = count("", lay.etp, {EXPERT: kinds["E"] / lay.ep})
    return [*numbers, count("", lay.tp, kinds | ends), experts]


@cache
def _one_of_each(preset: VLMPreset, adapters: Adapters | None) -> Counter[Place]:
    """Count the parameters of a layer of each kind, and of what is around them."""
    pattern = "".join(sorted(set(preset.language.hybrid_layer_pattern) - {"|"}))
    language = replace(preset.language, hybrid_layer_pattern=pattern)
    encoders = tuple(replace(each, layers=1) for each in preset.encoders)
    preset = replace(preset, language=language, encoders=encoders)
    with redirect_stdout(None):
        one = replace(Run.of(["--data", "mock"], 1, preset), adapters=adapters)
        with stages_on_meta(one, 0) as stages:
            return by_place(stages)


def by_place(stages: list[MimoModel]) -> Counter[Place]:
    """Count the parameters of a rank's virtual stages by their place in the model."""
    counts: Counter[Place] = Counter()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            part, (_, _, layer) = part_of(name), name.partition("coder.layers.")
            if part != LANGUAGE:
                kind = VIT_LAYER if part[1] == ENCODER and layer else part[1]
            elif layer:
                is_routed = ".mlp.experts." in name
                kinds = stage.language_model.decoder.layer_type_list
                kind = EXPERT if is_routed else kinds[int(layer.split(".")[0])]
            else:
                kind = FIRST if ".embedding." in name else LAST
            is_divided = bool(getattr(parameter, "tensor_model_parallel", False))
            counts[Place(part, kind, is_adapter(name), is_divided)] += parameter.numel()
    return counts
