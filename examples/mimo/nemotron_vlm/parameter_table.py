# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parameter counts per part of a model, in total and active for one token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from examples.mimo.nemotron_vlm.model import IMAGES
from examples.mimo.nemotron_vlm.own_options import PARTS
from examples.mimo.nemotron_vlm.presets import VLMPreset
from megatron.core.models.mimo.model.base import MimoModel

KINDS = {
    "M": "Mamba-2 layers",
    "G": "gated delta nets",
    "*": "attention layers",
    "E": "MoE layers",
}


def count_parameters(model: MimoModel, preset: VLMPreset) -> dict[str, tuple[int, int]]:
    """(total, active) parameters by part; of routed experts, top-k are active."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, parameter in model.named_parameters():
        share = 1.0
        if ".local_experts." in name or ".experts.weight" in name:
            share = preset.language.moe_router_topk / preset.language.num_experts
        entry = counts[_part(name, preset.language.hybrid_layer_pattern.replace("|", ""))]
        entry[0] += parameter.numel()
        entry[1] += parameter.numel() * share
    return {part: (total, round(active)) for part, (total, active) in counts.items()}


def count_by_module(stages: Sequence[MimoModel]) -> dict[str, int]:
    """Parameters that a rank holds, by module, of all its virtual stages."""
    counts = dict.fromkeys(PARTS, 0)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            counts[_module(name)] += parameter.numel()
    return counts


def format_ranks(counts: dict[tuple[int, int], dict[str, int]]) -> str:
    """What each of the first to last ranks holds, in billions, a line each."""

    def line(ranks: str, cells: Iterable[str]) -> str:
        return f"{ranks:14}" + "".join(f"{cell:>14}" for cell in cells)

    rows = [line("ranks", [*PARTS, "sum"])]
    for (first, last), held in counts.items():
        cells = [f"{count / 1e9:.4f} B" for count in (*held.values(), sum(held.values()))]
        rows.append(line(f"{first}-{last}" if last > first else str(first), cells))
    return "\n".join(rows)


def _module(name: str) -> str:
    if not name.startswith(f"modality_submodules.{IMAGES}."):
        return "language"
    return "projector" if ".input_projections." in name else "encoder"


def _part(name: str, pattern: str) -> str:
    if _module(name) != "language":
        return _module(name)
    if ".decoder.layers." in name:
        layer = int(name.split(".decoder.layers.")[1].split(".")[0])
        return f"language: {KINDS[pattern[layer]]}"
    return "language: embedding, norm, output"


def format_table(counts: dict[str, tuple[int, int]]) -> str:
    """The counts as text, in billions, with the language model's sum and everything's."""

    def line(part: str, total: int, active: int) -> str:
        return f"{part:34} {total / 1e9:10.4f} B {active / 1e9:10.4f} B"

    def summed(prefix: str) -> tuple[int, int]:
        chosen = [c for part, c in counts.items() if part.startswith(prefix)]
        return sum(c[0] for c in chosen), sum(c[1] for c in chosen)

    return "\n".join(
        [f"{'part':34} {'total':>12} {'active':>12}"]
        + [line(part, *count) for part, count in sorted(counts.items())]
        + [line("language model", *summed("language")), line("all", *summed(""))]
    )
