# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes of the parameters that a rank holds, one by one because buffers pad each of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from examples.mimo.common.layout import Layout, Layouts
from examples.mimo.common.layout_rules import staged_pattern
from examples.mimo.nemotron_vlm.model.presets import LanguagePreset, VLMPreset

CONV_KERNEL = 4
"""Kernel size of Mamba-2's and gated delta nets' convolution; Megatron's default in all presets."""


ALIGNMENT = 64
"""Elements to a multiple of which Megatron's buffers align the start of each parameter."""


class Sizes(NamedTuple):
    """Elements of the parameters of one kind: plain, and with each parameter padded."""

    numbers: int = 0
    aligned: int = 0

    @classmethod
    def of(cls, parameters: list[int]) -> Sizes:
        """Sum up the elements of each parameter."""
        aligned = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in parameters)
        return cls(sum(parameters), aligned)


@dataclass(frozen=True)
class Held:
    """Parameters that a rank holds.

    encoder, projector: replicated over the encoder's dp. dense, experts: the language model's,
    replicated over its dp·cp and over its ``expt_dp``.
    """

    encoder: Sizes = Sizes()
    projector: Sizes = Sizes()
    dense: Sizes = Sizes()
    experts: Sizes = Sizes()

    @property
    def by_module(self) -> dict[str, int]:
        """Parameter counts by module, as the program's ``--dry-run RANKS`` prints them."""
        return {
            "encoder": self.encoder.numbers,
            "projector": self.projector.numbers,
            "language": self.dense.numbers + self.experts.numbers,
        }

    @property
    def by_replicas(self) -> tuple[int, int, int]:
        """Aligned elements replicated over encoder dp, over language dp·cp, and over expt_dp."""
        return (
            self.encoder.aligned + self.projector.aligned,
            self.dense.aligned,
            self.experts.aligned,
        )


def stages_of(preset: VLMPreset, layouts: Layouts) -> list[Held]:
    """Return the parameters of a rank of each pipeline stage; a separate encoder's come first."""
    lay = layouts.language
    language = [
        _language_stage(preset.language, lay.tp, lay.ep, lay.etp, lay.pp, lay.vpp, stage)
        for stage in range(lay.pp)
    ]
    encoder = [
        _encoder_stage(preset, layouts.encoder.tp, layouts.encoder.pp, stage)
        for stage in range(layouts.encoder.pp)
    ]
    if layouts.non_colocated:
        return encoder + language
    return [Held(encoder[0].encoder, encoder[0].projector, s.dense, s.experts) for s in language]


@cache
def chunks_of(pattern: str, layout: Layout) -> list[str]:
    """Return the layers of each virtual stage of the whole pipeline, in its order."""
    return (pattern if "|" in pattern else staged_pattern(pattern, layout)).split("|")


def chunks_of_stage(pattern: str, layout: Layout, stage: int) -> list[str]:
    """Return the layers of each virtual stage of a stage: every pp-th one of the pipeline."""
    return chunks_of(pattern, layout)[stage :: layout.pp]


@cache
def _language_stage(
    p: LanguagePreset, tp: int, ep: int, etp: int, pp: int, vpp: int, stage: int
) -> Held:
    layout = Layout(tp=tp, ep=ep, etp=etp, pp=pp, vpp=vpp)
    dense: list[int] = []
    experts: list[int] = []
    for layer in "".join(chunks_of_stage(p.hybrid_layer_pattern, layout, stage)):
        dense += _dense_of(layer, p, layout.tp)
        if layer == "E":
            each = p.hidden_size * p.moe_ffn_hidden_size // layout.etp
            experts += [each, each] * (p.num_experts // layout.ep)
    vocabulary = p.vocab_size // layout.tp * p.hidden_size
    if stage == 0:
        dense.insert(0, vocabulary)
    if stage == layout.pp - 1:
        dense += [p.hidden_size, vocabulary]
    return Held(dense=Sizes.of(dense), experts=Sizes.of(experts))


def _dense_of(layer: str, p: LanguagePreset, tp: int) -> list[int]:
    """Return the size of each parameter of a language layer, without routed experts."""
    h = p.hidden_size
    if layer == "*":
        q, kv = p.num_attention_heads * p.kv_channels, p.num_query_groups * p.kv_channels
        return [h, h * (q + 2 * kv) // tp, q * h // tp]
    if layer == "M":
        inner, heads = p.mamba_num_heads * p.mamba_head_dim, p.mamba_num_heads
        mixed = inner + 2 * p.mamba_num_groups * p.mamba_state_dim
        small = [heads // tp] * 3  # dt's bias, A and D
        projections = [h * (inner + mixed + heads) // tp, inner * h // tp]
        return [h, *small, CONV_KERNEL * mixed // tp, mixed // tp, inner // tp, *projections]
    if layer == "G":
        key = p.linear_num_key_heads * p.linear_key_head_dim
        value = p.linear_num_value_heads * p.linear_value_head_dim
        heads, mixed = p.linear_num_value_heads, 2 * key + value
        projections = [h * (mixed + value + 2 * heads) // tp, value * h // tp]
        small = [heads // tp] * 2
        return [h, *small, CONV_KERNEL * mixed // tp, p.linear_value_head_dim, *projections]
    if layer == "E":
        shared = h * p.moe_shared_expert_intermediate_size // tp
        return [h, h * p.num_experts, shared, shared]
    ffn = h * (p.ffn_hidden_size or 4 * h) // tp
    return [h, ffn, ffn]


@cache
def _encoder_stage(preset: VLMPreset, tp: int, pp: int, stage: int) -> Held:
    e = preset.encoder
    h = e.hidden
    layer = [h, h, 3 * h * h // tp, 3 * h // tp, h * h // tp, h]
    layer += [h, h, h * e.ffn // tp, e.ffn // tp, e.ffn * h // tp, h]
    encoder = layer * (e.layers // pp)
    if stage == 0:
        positions = (e.max_tile // e.patch) ** 2 * h
        encoder += [e.class_tokens * h, positions, 3 * e.patch**2 * h // tp]
    projector: list[int] = []
    if stage == pp - 1:
        inner = preset.projector_ffn // tp
        widths = e.output_size * inner, inner * preset.language.hidden_size
        projector = [e.output_size, *widths]
    return Held(encoder=Sizes.of(encoder), projector=Sizes.of(projector))
