# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as directories of Hugging Face's peft.

peft adapts modules of transformers' model: q_proj, k_proj and v_proj where ours has one linear_qkv,
and the experts of a layer as one. B's rows go where the rows of the adapted weight go.
"""

import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.models.nemotron_h_omni import NemotronH_Omni_Reasoning_V3

from conversion.merged import matrices_of, pairs_of
from conversion.published import TensorFiles, write_file
from conversion.rows import Shape, Slice, Translation, check_tensors, program_parts, rows_of
from conversion.torch_dist import Checkpoint, write_checkpoint
from conversion.whole_models import MODEL, preset_of_run, their_config, whole_directory
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.model.encoders.hugging_face import check_values
from examples.mimo.nemotron_vlm.model.part_settings import part_of
from examples.mimo.nemotron_vlm.model.presets import VLMPreset, write_preset
from megatron.core.transformer.lora import is_adapter, scale_of

PREFIX = "base_model.model."
"""Prefix of names in peft's files; transformers' names of modules follow."""

INNER, OUTER = "up_proj", "down_proj"
"""Parameters of experts. If both have adapters, peft has those of the first in ``base_layer``."""

EXPECTED = {
    "peft_type": "LORA",
    "alpha_pattern": {},
    "bias": "none",
    "fan_in_fan_out": False,
    "layer_replication": None,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "trainable_token_indices": None,
    "use_dora": False,
}
"""Fields of a LoraConfig for which our adapters support one value."""


def _parameters(translation: Translation, config) -> dict[str, list[list[Slice]]]:
    """Return what transformers' parameters are made of.

    Args:
        config: transformers' configuration of the model.

    Returns:
        A list of slices by a parameter's name; a layer's experts are one parameter, with a list for
        each.
    """
    with torch.device("meta"):
        rules = get_model_conversion_mapping(NemotronH_Omni_Reasoning_V3(config))
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    found: dict[str, list[list[Slice]]] = defaultdict(list)
    for name, slices in translation.of_theirs.items():
        renamed, pattern = rename_source_key(name, renamings, converters)
        targets = [renamed]
        for rule in converters:
            if pattern in rule.source_patterns:  # several targets have equal shares of its rows
                first = rule.target_patterns[0]
                targets = [renamed.replace(first, target) for target in rule.target_patterns]
        rows = translation.shapes[name][0] // len(targets)
        for number, target in enumerate(targets):
            found[target].append([each for each in slices if each.their_start // rows == number])
    return found


def to_peft(checkpoint: Path, like: Path | None, out: Path) -> None:
    """Write the adapters of a LoRA run as peft's directory.

    Args:
        checkpoint: directory of the program's checkpoint.
        like: the base's Hugging Face directory, which the adapters will name.

    Raises:
        UserError: the checkpoint has no adapters, or has trained more than projectors beside them.
    """
    saved = Checkpoint(checkpoint)
    if not any(map(is_adapter, saved.tensors)):
        raise UserError(f"{saved.directory} has no adapters: leave out --adapter")
    args, preset = saved.options, preset_of_run(saved.options)
    translation = Translation(preset)
    parts, pairs = translation.parts, pairs_of(saved, translation.parts)
    firsts, seconds = ({name: pair[which] for name, pair in pairs.items()} for which in (0, 1))
    parameters = _parameters(translation, their_config(preset, args.token_ids))
    adapted = [target for target, pieces in parameters.items() if pieces[0][0].ours in pairs]
    tensors: dict[str, torch.Tensor] = {}
    trained: set[str] = set()
    for target, pieces in parameters.items():
        first = pieces[0][0]
        if parts[first.ours].key in saved.tensors:
            if part_of(first.ours)[1] != "projector":
                raise UserError(f"{first.ours} was trained, too: leave out --adapter")
            ours = {each.ours: parts[each.ours] for each in pieces[0]}
            tensors[target] = rows_of(pieces[0], saved.read(ours))
            trained.add(target.partition(".")[0])
        elif target in adapted:
            place = _place(target, adapted)
            tensors[f"{place}.lora_A.weight"] = torch.cat([firsts[p[0].ours] for p in pieces])
            rows = [rows_of(slices, seconds) for slices in pieces]
            tensors[f"{place}.lora_B.weight"] = torch.stack(rows, -1).flatten(1)
    experts = sorted(target for target in adapted if not target.endswith(".weight"))
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=like and str(like.absolute()),
        inference_mode=True,
        r=args.lora_dim,
        lora_alpha=args.lora_alpha,
        use_rslora=args.lora_rs,
        lora_dropout=0.0 if experts else args.lora_dropout,  # peft has none for parameters
        target_modules=sorted(_place(each, ()) for each in {*adapted} - {*experts}),
        target_parameters=experts or None,
        modules_to_save=sorted(trained) or None,
    )
    with whole_directory(out) as directory:
        config.save_pretrained(directory)
        named = {PREFIX + name: tensor for name, tensor in tensors.items()}
        write_file(directory / "adapter_model.safetensors", named)


def _place(target: str, adapted: Collection[str]) -> str:
    """Return peft's name of the module that adapts a parameter of transformers' model.

    Args:
        adapted: all parameters with adapters.
    """
    module, _, parameter = target.rpartition(".")
    is_inner = parameter == INNER and f"{module}.{OUTER}" in adapted
    return f"{module}.base_layer" if is_inner else module


def from_peft(directory: Path, preset: VLMPreset, out: Path) -> str:
    """Write a checkpoint of the program from peft's directory.

    Several A's of one weight of ours become one with all their rows; B has zeros in the columns of
    the others. All adapters get the largest rank, and initial weights where theirs have none.

    Args:
        preset: sizes of the base.

    Returns:
        Options of the adapters, for a run that loads them.

    Raises:
        UserError: the adapters cannot be ours; nothing is written then.
    """
    try:
        config = PeftConfig.from_pretrained(directory)
    except (ValueError, TypeError) as error:
        raise UserError(f"{directory}: no adapters of peft: {error}") from error
    check_values("the adapters", config, EXPECTED)
    tokens = {each.name: each.token for each in preset.encoders}
    translation, files = Translation(preset), TensorFiles(directory)
    parameters = _parameters(translation, their_config(preset, tokens))
    ends = tuple(f".{name}" for name in ["weight", *(config.target_parameters or ())])
    chosen = [target for target in parameters if f".{target}".endswith(ends)]
    wanted: dict[str, Shape] = {}
    adapted: dict[str, tuple[str, str]] = {}
    for target in chosen:
        a, b = (f"{PREFIX}{_place(target, chosen)}.lora_{each}.weight" for each in "AB")
        if not {a, b}.isdisjoint(files.shapes):
            pieces, adapted[target] = parameters[target], (a, b)
            rank, columns = config.r * len(pieces), translation.shapes[pieces[0][0].theirs][1:]
            wanted |= {a: (rank, sum(columns)), b: (sum(s.count for s in pieces[0]), rank)}
    check_tensors(wanted, files.shapes, files.directory)
    words: set[str] = set()
    firsts: dict[str, list[torch.Tensor]] = defaultdict(list)
    updates: dict[str, list[tuple[slice, int, torch.Tensor]]] = defaultdict(list)
    for target, (a, b) in adapted.items():
        pieces = parameters[target]
        seconds = files.read(b).unflatten(1, (-1, len(pieces))).unbind(-1)
        firsts_of = files.read(a).chunk(len(pieces))
        for slices, first, second in zip(pieces, firsts_of, seconds, strict=True):
            shares = second.split([each.count for each in slices])
            for each, rows in zip(slices, shares, strict=True):
                ours = matrices_of(each.ours)
                known = firsts[ours[0]]
                if not (same := [n for n, one in enumerate(known) if torch.equal(one, first)]):
                    same = [len(known)]
                    known.append(first)
                place = slice(each.our_start, each.our_start + each.count)
                updates[ours[1]].append((place, same[0] * config.r, rows))
                words.add(_word(each.ours))
    if lost := sorted(name for name in firsts if ".layers." not in name):
        raise UserError(f"{directory}: our model has no adapters of {', '.join(lost)}")
    rank = max(map(len, firsts.values())) * config.r
    alpha = scale_of(config.lora_alpha, config.r, config.use_rslora) * rank
    options = ["--lora-dim", str(rank), "--lora-alpha", f"{alpha:.9g}"]
    options += ["--lora-target-modules", ",".join(sorted(words))]
    every, args = program_parts(preset, *options)
    parts = {name: part for name, part in every.items() if is_adapter(name)}
    dtype, rng = files.dtype(next(iter(wanted))), torch.Generator().manual_seed(args.seed)

    def make(name: str) -> torch.Tensor:
        value = torch.zeros(parts[name].local_shape, dtype=dtype)
        if ".linear_in." in name:
            bound = value.shape[-1] ** -0.5  # as the program's own initial weights
            value.uniform_(-bound, bound, generator=rng)
        matrices = {name: value}
        if value.ndim == 3:
            matrices = {f"{name}[{number}]": each for number, each in enumerate(value)}
        for part, own in matrices.items():
            for number, first in enumerate(firsts.get(part, ())):
                own[number * config.r : (number + 1) * config.r] = first
            for place, at, rows in updates.get(part, ()):
                own[place, at : at + config.r] = rows
        return value

    with whole_directory(out) as partial:
        write_preset(preset, partial / MODEL)
        args.model, args.lora_base = str(out.absolute() / MODEL), None
        write_checkpoint(partial, parts, dict.fromkeys(parts, dtype), make, args=args)
    return " ".join(options)


def _word(weight: str) -> str:
    """Return the word of ``--lora-target-modules`` for a weight of ours in a stack of layers."""
    path = weight.rpartition(".weight")[0].rpartition(".layers.")[2]
    path = re.sub(r"^\d+\.", "", path).replace("experts.experts", "experts")
    module, _ = part_of(weight)
    return f"{module}:{path}" if module else path
