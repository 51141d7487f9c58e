# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as directories of Hugging Face's peft.

peft adapts modules of transformers' model: q_proj, k_proj and v_proj where ours has one linear_qkv,
and the experts of a layer as one. B's rows go where the rows of the adapted weight go.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig
from safetensors.torch import save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.models.nemotron_h_omni import NemotronH_Omni_Reasoning_V3

from conversion.directions import MODEL, preset_of_run, whole_directory
from conversion.merged import adapters_of, matrices_of
from conversion.program_model import program_model, saved_key
from conversion.published import parts_of, translation_of
from conversion.rows import Shape, differences, refuse
from conversion.tensor_files import TensorFiles
from conversion.torch_dist import Checkpoint, write_checkpoint
from conversion.trained import their_config
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


class _TheirNames:
    """The tensors of a whole VLM of transformers.

    translation: of all parts.

    Args:
        shapes: shapes of our tensors, by name.

    Raises:
        UserError: transformers has no such model.
    """

    def __init__(self, preset: VLMPreset, shapes: Mapping[str, Shape]) -> None:
        config = their_config(preset, {each.name: each.token for each in preset.encoders})
        self.translation = translation_of(parts_of(preset), preset, shapes)
        with torch.device("meta"):
            rules = get_model_conversion_mapping(NemotronH_Omni_Reasoning_V3(config))
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def targets(self, name: str) -> list[str]:
        """Return the parameters that a tensor of the files becomes: several have equal shares of
        its rows; the experts of a layer are one."""
        renamed, pattern = rename_source_key(name, self._renamings, self._converters)
        for rule in self._converters:
            if pattern in rule.source_patterns:
                first = rule.target_patterns[0]
                return [renamed.replace(first, target) for target in rule.target_patterns]
        return [renamed]


def to_peft(checkpoint: Path, like: Path | None, out: Path) -> None:
    """Write the adapters of a LoRA run as peft's directory.

    Args:
        checkpoint: directory of the program's checkpoint.
        like: the base's Hugging Face directory, which the adapters will name.

    Raises:
        UserError: the checkpoint has no adapters, or has trained more than projectors beside them.
    """
    saved = Checkpoint(checkpoint)
    held = saved.whole(adapters_of(saved))
    if not held:
        raise UserError(f"{saved.directory} has no adapters: leave out --adapter")
    args, preset = saved.options, preset_of_run(saved.options)
    with program_model(preset) as program:
        parts, names = program.parts, _TheirNames(preset, program.shapes)
    translation, tensors = names.translation, {}
    pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for name, slices in translation.of_theirs.items():
        ours, targets = {each.ours: parts[each.ours] for each in slices}, names.targets(name)
        part = parts[slices[0].ours]
        place = part.global_offset[: part.prepend_axis_num]
        if saved_key(part.key) in saved.tensors:
            if part_of(part.key)[1] != "projector":
                raise UserError(f"{part.key} was trained, too: leave out --adapter")
            tensors[targets[0]] = translation.split(name, saved.read(ours))
        elif (first := matrices_of(saved_key(part.key))[0]) in held:
            seconds = {each: matrices_of(saved_key(ours[each].key))[1] for each in ours}
            rows = {each: held[second][place] for each, second in seconds.items()}
            rows = translation.split(name, rows).chunk(len(targets))
            for target, second in zip(targets, rows, strict=True):
                pairs[target].append((held[first][place], second))
    trained = sorted({name.partition(".")[0] for name in tensors})
    for target, each in pairs.items():
        firsts, seconds = zip(*each, strict=True)
        place = _place(target, pairs)
        tensors[f"{place}.lora_A.weight"] = torch.cat(firsts)
        tensors[f"{place}.lora_B.weight"] = torch.stack(seconds, -1).flatten(1)
    parameters = sorted(target for target in pairs if not target.endswith(".weight"))
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=like and str(like.absolute()),
        inference_mode=True,
        r=args.lora_dim,
        lora_alpha=args.lora_alpha,
        use_rslora=args.lora_rs,
        lora_dropout=0.0 if parameters else args.lora_dropout,  # peft has none for parameters
        target_modules=sorted(_place(each, ()) for each in pairs.keys() - parameters),
        target_parameters=parameters or None,
        modules_to_save=trained or None,
    )
    with whole_directory(out) as directory:
        config.save_pretrained(directory)
        file = directory / "adapter_model.safetensors"
        save_file({PREFIX + name: tensor.clone() for name, tensor in tensors.items()}, file)
        file.chmod(directory.stat().st_mode & 0o666)  # save_file makes it private


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
    with program_model(preset) as program:
        names = _TheirNames(preset, program.shapes)
    theirs = _read(TensorFiles(directory, may_be_none=False), config, names)
    words: set[str] = set()
    firsts: dict[str, list[torch.Tensor]] = defaultdict(list)
    updates: dict[str, list[tuple[slice, int, torch.Tensor]]] = defaultdict(list)
    for ours, slices in names.translation.of_ours.items():
        first, second = matrices_of(ours)
        for each in slices:
            rows = names.translation.shapes[each.theirs][0] // len(names.targets(each.theirs))
            piece, start = divmod(each.their_start, rows)
            if (each.theirs, piece) in theirs:
                a, b = theirs[each.theirs, piece]
                place = slice(each.our_start, each.our_start + each.count)
                at = _index(firsts[first], a) * config.r
                updates[second].append((place, at, b[start : start + each.count]))
                words.add(_word(ours))
    if lost := sorted(name for name in firsts if ".layers." not in name):
        raise UserError(f"{directory}: our model has no adapters of {', '.join(lost)}")
    rank = max(map(len, firsts.values())) * config.r
    alpha = scale_of(config.lora_alpha, config.r, config.use_rslora) * rank
    options = ["--lora-dim", str(rank), "--lora-alpha", f"{alpha:.9g}"]
    options += ["--lora-target-modules", ",".join(sorted(words))]
    with program_model(preset, *options) as program:
        parts = {name: part for name, part in program.parts.items() if is_adapter(name)}

        def make(name: str) -> torch.Tensor:
            value = program.initial(name)
            for number, first in enumerate(firsts.get(name, ())):
                value[number * config.r : (number + 1) * config.r] = first
            for place, at, update in updates.get(name, ()):
                value[place, at : at + config.r] = update
            return value

        dtypes = dict.fromkeys(parts, next(iter(theirs.values()))[0].dtype)
        with whole_directory(out) as partial:
            write_preset(preset, partial / MODEL)
            args = program.run.args
            args.model, args.lora_base = str(out.absolute() / MODEL), None
            write_checkpoint(partial, parts, dtypes, make, args)
    return " ".join(options)


def _read(
    files: TensorFiles, config: LoraConfig, names: _TheirNames
) -> dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]]:
    """Read peft's tensors.

    Returns:
        A and B by the name of the tensor in a whole model's files that they adapt, and the number
        of the module that has this share of its rows.

    Raises:
        UserError: tensors are missing, surplus or misshapen, or there are none.
    """
    pieces: dict[str, list[tuple[str, int]]] = defaultdict(list)
    shapes: dict[str, tuple[int, int]] = {}
    for name, (rows, *columns) in names.translation.shapes.items():
        for piece, target in enumerate(targets := names.targets(name)):
            pieces[target].append((name, piece))
            shapes[target] = (rows // len(targets), sum(columns))
    ends = tuple(f".{name}" for name in ["weight", *(config.target_parameters or ())])
    chosen = {target for target in pieces if f".{target}".endswith(ends)}
    wanted, found = {}, {}
    for target in chosen:
        a, b = (f"{PREFIX}{_place(target, chosen)}.lora_{each}.weight" for each in "AB")
        if not {a, b}.isdisjoint(files.shapes):
            found[target], rank = (a, b), config.r * len(pieces[target])
            wanted |= {a: (rank, shapes[target][1]), b: (shapes[target][0], rank)}
    refuse(differences(wanted, files.shapes, files.directory))
    if not found:
        raise UserError(f"{files.directory} has no adapters")
    adapters = {}
    for target, (a, b) in found.items():
        firsts = files.read(a).unflatten(0, (len(pieces[target]), -1))
        seconds = files.read(b).unflatten(1, (-1, len(pieces[target]))).unbind(-1)
        adapters |= zip(pieces[target], zip(firsts, seconds, strict=True), strict=True)
    return adapters


def _index(tensors: list[torch.Tensor], tensor: torch.Tensor) -> int:
    """Return a tensor's place among others, to which it is added if it is new."""
    for number, other in enumerate(tensors):
        if torch.equal(tensor, other):
            return number
    tensors.append(tensor)
    return len(tensors) - 1


def _word(weight: str) -> str:
    """Return the word of ``--lora-target-modules`` for a weight of ours in a stack of layers."""
    path = weight.rpartition(".weight")[0].rpartition(".layers.")[2]
    path = re.sub(r"^\d+\.", "", path).replace("experts.experts", "experts")
    module, _ = part_of(weight)
    return f"{module}:{path}" if module else path
