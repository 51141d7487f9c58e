# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters that ranks hold, counted on the program's own model on the meta device.

There parameters have a shape and take no memory. A model of one layer of each kind is built once
for each set of sizes, in less than a tenth of a second; its parameters say whether tensor
parallelism divides them, so what a rank of any layout holds follows from them.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from examples.mimo.common.layout import Layout, Layouts
from examples.mimo.common.layout_rules import staged_pattern
from examples.mimo.nemotron_vlm.encoders import Encoder
from examples.mimo.nemotron_vlm.model.model import build_vlm, placed
from examples.mimo.nemotron_vlm.model.part_settings import LANGUAGE, ModelPart, part_of
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options.arguments import Options, parse
from examples.mimo.nemotron_vlm.planner.schedule import Stage
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.schedule.replaced import replaced
from megatron.core.models.mimo.setup.module_groups import make_modules, prepare_process
from megatron.core.models.mimo.setup.teardown import destroy
from megatron.training.global_vars import set_global_variables, unset_global_variables

ENCODER, VIT_LAYER, PROJECTOR = "encoder", "vit layer", "projector"
FIRST, LAST, EXPERT = "first stage", "last stage", "expert"
"""Places of parameters in the model, beside the letters of the language model's layers."""
ALIGNMENT, BUCKET_MULTIPLE = 64, 128
"""Megatron's buffers align the start of each parameter, and pad their end to a multiple of this and
of the replicas."""


Place = str | tuple[str, str]
"""Place of parameters in the model; an encoder's begins with the encoder's name."""


class Parameter(NamedTuple):
    """A parameter: its elements on this rank, and whether tensor parallelism divides them."""

    size: int
    is_divided: bool


def aligned(sizes: list[int]) -> int:
    """Return the elements of parameters of these sizes in Megatron's buffers, without the end."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def padded(elements: int, replicas: int) -> int:
    """Return the elements of a buffer, with its end."""
    multiple = math.lcm(replicas, BUCKET_MULTIPLE)
    return -(-elements // multiple) * multiple


def held(
    preset: VLMPreset,
    layouts: Layouts,
    stage: Stage,
    frozen: frozenset[ModelPart] = frozenset(),
) -> tuple[int, ...]:
    """Return the elements that a rank of a stage holds, aligned as in Megatron's buffers.

    They are those of each encoder with its projector, replicated over the encoder's dp; the
    language model's, replicated over its dp·cp; and its experts', replicated over ``expt_dp``.
    Frozen parts are left out.
    """
    lay, is_encoder = layouts.language, stage.module == "encoder"
    encoders = [
        _encoder_stage(preset, each, own.tp, own.pp, stage.number if is_encoder else 0, frozen)
        if not layouts.non_colocated or (is_encoder and place == stage.encoder)
        else 0
        for place, (each, own) in enumerate(zip(preset.encoders, layouts.encoders, strict=True))
    ]
    if is_encoder or LANGUAGE in frozen:
        return *encoders, 0, 0
    axes = lay.tp, lay.ep, lay.etp, lay.pp, lay.vpp
    return *encoders, *_language_stage(preset, *axes, stage.number)


@cache
def chunks_of(pattern: str, layout: Layout) -> list[str]:
    """Return the layers of each virtual stage of the whole pipeline, in its order."""
    return (pattern if "|" in pattern else staged_pattern(pattern, layout)).split("|")


def chunks_of_stage(pattern: str, layout: Layout, stage: int) -> list[str]:
    """Return the layers of each virtual stage of a stage: every pp-th one of the pipeline."""
    return chunks_of(pattern, layout)[stage :: layout.pp]


@cache
def _encoder_stage(
    preset: VLMPreset,
    encoder: Encoder,
    tp: int,
    pp: int,
    stage: int,
    frozen: frozenset[ModelPart],
) -> int:
    name = encoder.name
    places = {}
    if (name, ENCODER) not in frozen:
        places = {(name, VIT_LAYER): encoder.layers // pp, (name, ENCODER): stage == 0}
    if (name, PROJECTOR) not in frozen:
        places[name, PROJECTOR] = stage == pp - 1
    return _aligned(preset, places, tp)


@cache
def _language_stage(
    preset: VLMPreset, tp: int, ep: int, etp: int, pp: int, vpp: int, stage: int
) -> tuple[int, int]:
    pattern = preset.language.hybrid_layer_pattern
    layout = Layout(tp=tp, ep=ep, etp=etp, pp=pp, vpp=vpp)
    layers = Counter("".join(chunks_of_stage(pattern, layout, stage)))
    experts = {EXPERT: layers["E"] * preset.language.num_experts // ep}
    places = layers | {FIRST: stage == 0, LAST: stage == pp - 1}
    return _aligned(preset, places, tp), _aligned(preset, experts, etp)


def _aligned(preset: VLMPreset, places: dict[Place, int], tp: int) -> int:
    """Sum up the parameters of places in the model, each taken several times."""
    found = _one_of_each(preset)
    total = 0
    for place, times in places.items():
        sizes = [each.size // (tp if each.is_divided else 1) for each in found.get(place, ())]
        total += times * aligned(sizes)
    return total


@cache
def _one_of_each(preset: VLMPreset) -> dict[Place, list[Parameter]]:
    """Return the parameters of a layer of each kind, of an expert, and of what is around them."""
    pattern = "".join(sorted(set(preset.language.hybrid_layer_pattern) - {"|"}))
    language = replace(preset.language, hybrid_layer_pattern=pattern)
    encoders = tuple(replace(each, layers=1) for each in preset.encoders)
    preset = replace(preset, language=language, encoders=encoders)
    with redirect_stdout(None), stages_on_meta(parse(["--data", "mock"], 1, preset), 0) as stages:
        found = by_place(stages)
    found[EXPERT] = found.get(EXPERT, [])[:2]  # both matrices of the first
    return found


def by_place(stages: list[MimoModel]) -> dict[Place, list[Parameter]]:
    """Return the parameters of a rank's virtual stages by their place in the model.

    An encoder's are ``VIT_LAYER``, ``ENCODER`` for what surrounds these, and ``PROJECTOR``. The
    language model's are the letter of a layer, ``EXPERT`` for its routed experts, and ``FIRST`` and
    ``LAST`` for what the first and the last stage of a pipeline have besides.
    """
    found: dict[Place, list[Parameter]] = defaultdict(list)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            (module, part), (_, _, layer) = part_of(name), name.partition("coder.layers.")
            if module:
                place = module, VIT_LAYER if part == ENCODER and layer else part
            elif layer:
                is_routed = ".local_experts." in name or ".experts.weight" in name
                kinds = stage.language_model.decoder.layer_type_list
                place = EXPERT if is_routed else kinds[int(layer.split(".")[0])]
            else:
                place = FIRST if ".embedding." in name else LAST
            is_divided = getattr(parameter, "tensor_model_parallel", False)
            found[place].append(Parameter(parameter.numel(), is_divided))
    return dict(found)


@contextmanager
def stages_on_meta(options: Options, rank: int) -> Iterator[list[MimoModel]]:
    """Build a rank's virtual stages on the meta device, with process groups that send nothing."""
    args, configs = options.args, options.configs
    with ExitStack() as undone:
        # Nothing runs, so no graph is needed; Megatron's own layers have the same parameters.
        counted = {"cuda_graph_impl": "none", "transformer_impl": "local"}
        of_encoders = [config for each in configs.encoders for config in each.values()]
        for part in (args, *of_encoders, configs.language):
            undone.enter_context(replaced(part, **counted))
        set_global_variables(args, build_tokenizer=False)
        undone.callback(unset_global_variables)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
        undone.callback(dist.destroy_process_group)
        modules = make_modules(placed(options.preset, options.layouts), "fake")
        prepare_process(modules, args)
        with torch.device("meta"):  # under the CPU runtime the current CUDA device, too
            stages = build_vlm(args, options.preset, configs, modules)
        undone.callback(destroy, stages, modules)
        yield stages
