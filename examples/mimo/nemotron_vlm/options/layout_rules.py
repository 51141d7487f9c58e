# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that the modules' parallel layouts must keep, and the nearest layouts that keep them.

Pure arithmetic: no process, no device. Every rank reaches the same verdict from the same text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import (
    COLOCATED,
    NON_COLOCATED,
    Batch,
    Layout,
    Layouts,
)
from examples.mimo.common.layout_rules import (
    CHUNKWISE,
    language_violation,
    size_violation,
    undivided,
)
from examples.mimo.nemotron_vlm.model.presets import VLMPreset

Rule = Callable[[Layout], str | None]
"""Returns the first rule that a module's layout breaks, or None."""


def resolve(
    encoder: Layout,
    language: Layout,
    batch: Batch,
    world_size: int,
    preset: VLMPreset,
    placement: str = COLOCATED,
    linear_cp_mode: str = CHUNKWISE,
) -> Layouts:
    """Derive the sizes that were left out, check every rule, and return the layouts.

    Raises:
        UserError: a rule is broken; the message names the numbers, the rule, and the nearest
            layouts that would work.
    """
    for_encoder, for_language = ranks_of_modules(encoder, language, world_size, placement)
    encoder, language = _derive(encoder, for_encoder), _derive(language, for_language)
    layouts = Layouts(encoder, language, batch, placement)

    def encoder_rule(layout: Layout) -> str | None:
        return encoder_violation(layout, for_encoder, preset, layouts.non_colocated)

    def language_rule(layout: Layout) -> str | None:
        if layouts.non_colocated and layout.vpp > 1:
            return f"vpp={layout.vpp} needs --placement {COLOCATED}"
        return language_violation(layout, for_language, preset.language, batch, linear_cp_mode)

    def both(layout: Layout) -> str | None:
        return encoder_rule(layout) or pair_violation(replace(layouts, encoder=layout))

    for layout, ranks, rule, name, fitting in (
        (encoder, for_encoder, encoder_rule, f"--encoder {encoder}", ""),
        (language, for_language, language_rule, f"--language {language}", ""),
        (
            encoder,
            for_encoder,
            both,
            f"--encoder {encoder} with --language {language}",
            "encoders ",
        ),
    ):
        if broken := rule(layout):
            raise UserError(f"{name}: {broken}. {_nearest(layout, ranks, rule, fitting)}")
    return layouts


def ranks_of_modules(
    encoder: Layout, language: Layout, world_size: int, placement: str
) -> tuple[int, int]:
    """Return the number of ranks of the encoder and of the language model.

    Non-colocated, a module takes the ranks that its layout needs. If one layout lacks ``dp``, that
    module takes the remaining ranks; if both lack it, the encoder takes one replica.

    Args:
        encoder, language: layouts as asked for; ``dp`` is 0 if it was left out.

    Raises:
        UserError: one module leaves no rank for the other.
    """
    if placement == COLOCATED:
        return world_size, world_size
    language_first = language.dp and not encoder.dp
    name, other = ("--language", "encoder") if language_first else ("--encoder", "language model")
    layout = language if language_first else encoder
    taken = layout.size if layout.dp else layout.tp * layout.cp * layout.pp
    if taken >= world_size:
        raise UserError(
            f"--placement {NON_COLOCATED}: {name} takes {taken} of {world_size} ranks and leaves "
            f"none for the {other}"
        )
    left = world_size - taken
    return (left, taken) if language_first else (taken, left)


def _derive(layout: Layout, world_size: int) -> Layout:
    dp = layout.dp or max(1, world_size // (layout.tp * layout.cp * layout.pp))
    return replace(layout, dp=dp, etp=layout.etp or layout.tp)


def encoder_violation(
    layout: Layout, world_size: int, preset: VLMPreset, pipelined: bool
) -> str | None:
    """Return the first rule that this encoder layout breaks, or None."""
    e, p = layout, preset.encoder
    if e.cp * e.vpp * e.ep > 1 or e.etp != e.tp or (e.pp > 1 and not pipelined):
        return f"an encoder takes tp and dp only (and pp with --placement {NON_COLOCATED})"
    divided = {
        "attention heads": p.heads,
        "features": p.hidden,
        "FFN rows": p.ffn,
        "projector rows": preset.projector_ffn,
    }
    return (
        undivided("pp", e.pp, {"layers": p.layers})
        or undivided("tp", e.tp, divided)
        or size_violation(e, world_size)
    )


def pair_violation(layouts: Layouts) -> str | None:
    """Return the first rule that the two layouts break together, or None.

    Colocated there is no such rule: the bridge takes any number of rows from each encoder rank.
    """
    e, lang, micro_size = layouts.encoder, layouts.language, layouts.batch.micro_size
    if not layouts.non_colocated:
        return None
    if e.dp % lang.dp and lang.dp % e.dp:
        return (
            f"with --placement {NON_COLOCATED} one of encoder dp={e.dp} and language "
            f"dp={lang.dp} must divide the other: its bridge splits or joins whole slices"
        )
    if micro_size * lang.dp % e.dp:
        return (
            f"encoder dp={e.dp} must divide the {micro_size * lang.dp} samples of a microbatch "
            f"(micro batch {micro_size} × language dp {lang.dp})"
        )
    return None


def _candidates(world_size: int, axes: list[str]) -> list[Layout]:
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    sizes = itertools.product(divisors, repeat=len(axes))
    found = [_derive(Layout(**dict(zip(axes, s, strict=True))), world_size) for s in sizes]
    return [layout for layout in found if layout.size == world_size]


def _distance(a: Layout, b: Layout) -> float:
    axes = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp")
    return sum(abs(math.log2(getattr(a, axis) / getattr(b, axis))) for axis in axes)


def _nearest(wanted: Layout, world_size: int, rule: Rule, what: str) -> str:
    axes = ["tp"] + [axis for axis in ("cp", "pp", "ep") if getattr(wanted, axis) > 1]
    plain = _candidates(world_size, axes)
    etp = None if wanted.etp == wanted.tp else wanted.etp
    same = [replace(c, etp=etp or c.etp, vpp=wanted.vpp) for c in plain]
    fitting = {c for c in (*same, *plain) if not rule(c)}
    if not fitting:
        return "No layout of these ranks fits; change the batch, the sequence length or the ranks"
    near = sorted(fitting, key=lambda lay: (_distance(lay, wanted), str(lay)))[:3]
    return f"Nearest {what}that fit: " + "  ".join(map(str, near))
