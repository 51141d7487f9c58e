# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that the modules' parallel layouts must keep, and the nearest layouts that keep them.

Pure arithmetic: no process, no device. Every rank reaches the same verdict from the same text.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial

from examples.mimo.common.layout import COLOCATED, NON_COLOCATED, Batch, Layout, Layouts
from examples.mimo.common.layout_rules import (
    language_violation,
    never_spanned,
    size_violation,
    undivided,
)
from examples.mimo.nemotron_vlm.model.encoders import Encoder
from examples.mimo.nemotron_vlm.model.presets import VLMPreset

Check = Callable[[Layout], str | None]
"""Returns the first rule that a module's layout breaks, or None."""


def violation(layouts: Layouts, ranks: Sequence[int], preset: VLMPreset) -> str | None:
    """Return the first rule that the layouts break, and the nearest layouts that keep it, or None.

    Args:
        ranks: of each module, by `ranks_of_modules`.
    """
    if min(ranks) < 1:
        modules = zip(ranks, (*preset.names, "language"), strict=True)
        shares = " and ".join(f"{count} for {name}" for count, name in modules)
        return (
            f"--placement {NON_COLOCATED}: the layouts leave {shares} of {sum(ranks)} ranks; each "
            "module needs one or more"
        )
    for text, layout, count, rule in _rules(layouts, ranks, preset):
        if broken := never_spanned(layout, count) or rule(layout):
            return f"{text}: {broken}. {_nearest(layout, count, rule)}"
    return None


def are_allowed(layouts: Layouts, ranks: Sequence[int], preset: VLMPreset) -> bool:
    """Return whether the layouts, in which each module has ranks, break no rule."""
    return not any(rule(layout) for _, layout, _, rule in _rules(layouts, ranks, preset))


def _rules(
    layouts: Layouts, ranks: Sequence[int], preset: VLMPreset
) -> list[tuple[str, Layout, int, Check]]:
    """Return options, the layout that they give, the ranks it may have, and its rule, in order."""
    language, apart, (*own, for_language) = layouts.language, layouts.non_colocated, ranks

    def of_language(lay: Layout) -> str | None:
        if apart and lay.vpp > 1:
            return f"vpp={lay.vpp} needs --placement {COLOCATED}"
        return language_violation(lay, for_language, preset.language, layouts.batch)

    def with_language(rule: Check) -> Check:
        return lambda lay: rule(lay) or pair_violation(lay, layouts)

    texts = [f"--encoder {text}" for text in layouts.named_encoders(preset.names)]
    modules = zip(texts, layouts.encoders, own, preset.encoders, strict=True)
    alone = [(text, lay, n, partial(encoder_violation, n, e, apart)) for text, lay, n, e in modules]
    of_all = f"--language {language}", language, for_language, of_language
    pairs = [(f"{text} with {of_all[0]}", *lay, with_language(rule)) for text, *lay, rule in alone]
    return [*alone, of_all, *pairs]


def derive(
    encoders: Sequence[Layout],
    language: Layout,
    batch: Batch,
    world_size: int,
    placement: str = COLOCATED,
) -> Layouts:
    """Derive the sizes that were left out; `violation` checks the layouts.

    Args:
        encoders: a layout for each encoder of the model, in its order.
    """
    *ranks, for_language = ranks_of_modules(encoders, language, world_size, placement)
    language = _derive(language, for_language)
    return Layouts(tuple(map(_derive, encoders, ranks)), language, batch, placement)


def ranks_of_modules(
    encoders: Sequence[Layout], language: Layout, world_size: int, placement: str
) -> list[int]:
    """Return the number of ranks of each encoder and of the language model, 0 or less for none.

    Non-colocated, a module takes the ranks that its layout needs. If one layout lacks ``dp``, that
    module takes the remaining ranks; if several lack it, the last of them does, and the others
    take one replica.

    Args:
        encoders, language: layouts as asked for; ``dp`` is 0 if it was left out.
    """
    modules = [*encoders, language]
    if placement == COLOCATED:
        return [world_size] * len(modules)
    last = len(modules) - 1
    rest = max((n for n, each in enumerate(modules) if not each.dp), default=last)
    taken = [each.tp * each.cp * each.pp * (each.dp or 1) for each in modules]
    taken[rest] = world_size - (sum(taken) - taken[rest])
    return taken


def _derive(layout: Layout, world_size: int) -> Layout:
    dp = layout.dp or max(1, world_size // max(1, layout.tp * layout.cp * layout.pp))
    return replace(layout, dp=dp, etp=layout.etp or layout.tp)


def encoder_violation(
    world_size: int, encoder: Encoder, pipelined: bool, layout: Layout
) -> str | None:
    """Return the first rule that this encoder layout breaks, or None."""
    e = layout
    if e.cp * e.vpp * e.ep > 1 or e.etp != e.tp or (e.pp > 1 and not pipelined):
        return f"an encoder takes tp and dp only (and pp with --placement {NON_COLOCATED})"
    return (
        undivided("pp", e.pp, encoder.staged())
        or undivided("tp", e.tp, encoder.divided())
        or size_violation(e, world_size)
    )


def pair_violation(encoder: Layout, layouts: Layouts) -> str | None:
    """Return the first rule that an encoder's layout breaks with the language model's, or None.

    Colocated there is no such rule: the bridge takes any number of rows from each encoder rank.
    """
    e, lang, micro_size = encoder, layouts.language, layouts.batch.micro_size
    if not layouts.non_colocated:
        return None
    if e.dp % lang.dp and lang.dp % e.dp:
        return (
            f"with --placement {NON_COLOCATED} one of encoder dp={e.dp} and language "
            f"dp={lang.dp} must divide the other: its bridge splits or joins whole slices"
        )
    stages = min(own.pp for own in layouts.encoders)
    if e.pp != stages:
        return f"several encoders on ranks of their own take as many stages each: pp={stages}"
    if micro_size * lang.dp % e.dp:
        return (
            f"encoder dp={e.dp} must divide the {micro_size * lang.dp} samples of a microbatch "
            f"(micro batch {micro_size} × language dp {lang.dp})"
        )
    return None


def _nearest(wanted: Layout, world_size: int, rule: Check) -> str:
    axes = ["tp"] + [axis for axis in ("cp", "pp", "ep") if getattr(wanted, axis) > 1]
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    tried = (
        _derive(Layout(**dict(zip(axes, sizes, strict=True))), world_size)
        for sizes in itertools.product(divisors, repeat=len(axes))
    )
    plain = [layout for layout in tried if layout.size == world_size]
    etp = None if wanted.etp == wanted.tp else wanted.etp
    same = [replace(c, etp=etp or c.etp, vpp=wanted.vpp) for c in plain]
    fitting = {c for c in (*same, *plain) if not rule(c)}
    if not fitting:
        return f"No layout of {world_size} ranks fits; change their number, the batch or the length"

    def distance(layout: Layout) -> tuple[float, str]:
        pairs = zip(astuple(layout), astuple(wanted), strict=True)
        return sum(abs(math.log2(a / b)) for a, b in pairs), str(layout)

    near = sorted(fitting, key=distance)[:3]
    return "Nearest that fit: " + "  ".join(map(str, near))
