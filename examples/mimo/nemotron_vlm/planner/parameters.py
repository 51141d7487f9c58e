# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters that ranks hold, counted on the program's own model on the meta device.

There parameters have a shape and take no memory. A model of one layer of each kind is built once
for each set of sizes, in less than a tenth of a second; its parameters say whether tensor
parallelism divides them, so what a rank of any layout holds follows from them.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from examples.mimo.common.layout import Layout, Layouts
from examples.mimo.common.layout_rules import staged_pattern
from examples.mimo.nemotron_vlm.model.adapters import Adapters
from examples.mimo.nemotron_vlm.model.model import build_vlm, placed
from examples.mimo.nemotron_vlm.model.part_settings import LANGUAGE, ModelPart, part_of
from examples.mimo.nemotron_vlm.model.presets import VLMPreset
from examples.mimo.nemotron_vlm.options.run import Run
from examples.mimo.nemotron_vlm.planner.plan import Stage
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.schedule.replaced import replaced
from megatron.core.models.mimo.setup.module_groups import make_modules, prepare_process
from megatron.core.models.mimo.setup.teardown import destroy
from megatron.core.transformer.lora import is_adapter
from megatron.training.global_vars import set_global_variables, unset_global_variables

ENCODER, VIT_LAYER, PROJECTOR = "encoder", "vit layer", "projector"
FIRST, LAST, EXPERT = "first stage", "last stage", "expert"
"""Places of parameters in the model, beside the letters of the language model's layers."""

Place = str | tuple[str, str]
"""Place of parameters in the model; an encoder's begins with the encoder's name."""


@cache
def chunks_of(pattern: str, layout: Layout) -> list[str]:
    """Return the layers of each virtual stage of the whole pipeline, in its order."""
    return (pattern if "|" in pattern else staged_pattern(pattern, layout)).split("|")


@cache
def held(
    preset: VLMPreset,
    layouts: Layouts,
    stage: Stage,
    frozen: frozenset[ModelPart] = frozenset(),
    adapters: Adapters | None = None,
) -> list[float]:
    """Return the parameters that a rank of a stage holds, without frozen parts, with adapters.

    They are those of each encoder with its projector, replicated over the encoder's dp; the
    language model's, replicated over its dp·cp; and its experts', replicated over ``expt_dp``.
    """
    base, added = _one_of_each(preset, adapters)
    lay, encoders, is_language = layouts.language, [], stage.encoder is None

    def count(place: Place, part: ModelPart, tp: int, times: float) -> float:
        kinds = [added.get(place), None if part in frozen else base.get(place)]
        return times * sum(whole + divided / tp for whole, divided in filter(None, kinds))

    for number, (each, own) in enumerate(zip(preset.encoders, layouts.encoders, strict=True)):
        at = 0 if is_language else stage.number
        is_here = not layouts.non_colocated or number == stage.encoder
        times = {VIT_LAYER: each.layers // own.pp, ENCODER: at == 0, PROJECTOR: at == own.pp - 1}
        encoders.append(0.0)
        for place, repeated in times.items():
            part = each.name, PROJECTOR if place == PROJECTOR else ENCODER
            encoders[-1] += count((each.name, place), part, own.tp, repeated * is_here)
    chunks = chunks_of(preset.language.hybrid_layer_pattern, lay)[stage.number :: lay.pp]
    kinds = "".join(chunks) * is_language
    ends = {FIRST: stage.number == 0, LAST: stage.number == lay.pp - 1}
    times = Counter(kinds) | {place: is_language and here for place, here in ends.items()}
    dense = sum(count(place, LANGUAGE, lay.tp, repeated) for place, repeated in times.items())
    return [*encoders, dense, count(EXPERT, LANGUAGE, lay.etp, kinds.count("E") / lay.ep)]


Counts = dict[Place, list[int]]
"""Numbers of parameters that tensor parallelism does not divide, and that it does."""


@cache
def _one_of_each(preset: VLMPreset, adapters: Adapters | None) -> tuple[Counts, Counts]:
    """Return the parameters of a layer of each kind, and of what is around them; and their
    adapters'."""
    pattern = "".join(sorted(set(preset.language.hybrid_layer_pattern) - {"|"}))
    language = replace(preset.language, hybrid_layer_pattern=pattern)
    encoders = tuple(replace(each, layers=1) for each in preset.encoders)
    preset = replace(preset, language=language, encoders=encoders)
    with redirect_stdout(None):
        one = replace(Run.of(["--data", "mock"], 1, preset), adapters=adapters)
        with stages_on_meta(one, 0) as stages:
            return by_place(stages)


def by_place(stages: list[MimoModel]) -> tuple[Counts, Counts]:
    """Count the parameters of a rank's virtual stages, and of their adapters, by their place in the
    model.

    An encoder's are ``VIT_LAYER``, ``ENCODER`` for what surrounds these, and ``PROJECTOR``. The
    language model's are the letter of a layer, ``EXPERT`` for its routed experts, and ``FIRST`` and
    ``LAST`` for what the first and the last stage of a pipeline have besides.
    """
    counts: tuple[Counts, Counts] = {}, {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            (module, part), (_, _, layer) = part_of(name), name.partition("coder.layers.")
            if module:
                place = module, VIT_LAYER if part == ENCODER and layer else part
            elif layer:
                is_routed = ".mlp.experts." in name
                kinds = stage.language_model.decoder.layer_type_list
                place = EXPERT if is_routed else kinds[int(layer.split(".")[0])]
            else:
                place = FIRST if ".embedding." in name else LAST
            is_divided = bool(getattr(parameter, "tensor_model_parallel", False))
            counts[is_adapter(name)].setdefault(place, [0, 0])[is_divided] += parameter.numel()
    return counts


@contextmanager
def stages_on_meta(options: Run, rank: int) -> Iterator[list[MimoModel]]:
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
            stages = build_vlm(args, options.preset, configs, modules, adapters=options.adapters)
        undone.callback(destroy, stages, modules)
        yield stages
