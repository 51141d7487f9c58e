# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parallel layouts of the modules: the rules they must keep, and what would fit instead.

Pure arithmetic: no process, no device. Every rank reaches the same verdict from the same text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

from examples.mimo.nemotron_vlm.errors import UserError
from examples.mimo.nemotron_vlm.layout import Batch, Layout, Layouts
from examples.mimo.nemotron_vlm.placement import COLOCATED, NON_COLOCATED, ranks_of_modules
from examples.mimo.nemotron_vlm.presets import VLMPreset
from examples.mimo.nemotron_vlm.recurrent_cp import STATE_PASSING, recurrent_cp_rules


def resolve(
    encoder: Layout,
    language: Layout,
    batch: Batch,
    world_size: int,
    preset: VLMPreset,
    placement: str = COLOCATED,
    linear_context_parallel: str = STATE_PASSING,
) -> Layouts:
    """Derive what was left out, check every rule, and return the layouts.

    Raises:
        UserError: naming the numbers, the rule, and the nearest layouts that would work.
    """
    for_encoder, for_language = ranks_of_modules(encoder, language, world_size, placement)
    encoder, language = _derive(encoder, for_encoder), _derive(language, for_language)
    layouts = Layouts(encoder, language, batch, placement)

    def violation(layout: Layout) -> str | None:
        return language_violation(layout, for_language, preset, batch, linear_context_parallel)

    def encoder_rule(layout: Layout) -> str | None:
        return encoder_violation(layout, for_encoder, preset, layouts.non_colocated)

    for module, layout, ranks, broken in (
        ("encoder", encoder, for_encoder, encoder_rule(encoder)),
        (
            "language",
            language,
            for_language,
            violation(language) or _interleaving_violation(layouts),
        ),
    ):
        if broken:
            fits = violation if module == "language" else encoder_rule
            near = _nearest(module, layout, ranks, fits)
            raise UserError(f"--{module} {layout}: {broken}. {near}")
    if broken := pair_violation(layouts):
        raise UserError(
            f"--encoder {encoder} with --language {language}: {broken}. "
            f"{_nearest_encoder(layouts, for_encoder, encoder_rule)}"
        )
    return layouts


def _derive(layout: Layout, world_size: int) -> Layout:
    dp = layout.dp or max(1, world_size // (layout.tp * layout.cp * layout.pp))
    return replace(layout, dp=dp, etp=layout.etp or layout.tp)


def _size_violation(layout: Layout, world_size: int) -> str | None:
    if layout.size == world_size:
        return None
    launcher = f"; torchrun --nproc-per-node {layout.size} starts more" if world_size == 1 else ""
    return (
        f"tp·cp·dp·pp = {layout.tp}·{layout.cp}·{layout.dp}·{layout.pp} = {layout.size} "
        f"must equal the {world_size} rank{'s' * (world_size > 1)}{launcher}"
    )


def _first(rules: list[tuple[bool, str]]) -> str | None:
    return next((text for broken, text in rules if broken), None)


def _interleaving_violation(layouts: Layouts) -> str | None:
    if layouts.non_colocated and layouts.language.vpp > 1:
        return f"vpp={layouts.language.vpp} needs --placement {COLOCATED}"
    return None


def encoder_violation(
    layout: Layout, world_size: int, preset: VLMPreset, pipelined: bool
) -> str | None:
    """The first rule that this encoder layout breaks, or None."""
    e, p = layout, preset.encoder
    divided = {
        "attention heads": p.heads,
        "features": p.hidden,
        "FFN rows": p.ffn,
        "projector rows": preset.projector_ffn,
    }
    return _first(
        [
            (
                e.cp * e.vpp * e.ep > 1 or e.etp != e.tp or (e.pp > 1 and not pipelined),
                f"an encoder takes tp and dp only (and pp with --placement {NON_COLOCATED})",
            ),
            (p.layers % e.pp > 0, f"pp={e.pp} must divide the {p.layers} layers"),
            *(
                (n % e.tp > 0, f"tp={e.tp} must divide the {n} {what}")
                for what, n in divided.items()
            ),
        ]
    ) or _size_violation(e, world_size)


def language_violation(
    layout: Layout,
    world_size: int,
    preset: VLMPreset,
    batch: Batch,
    linear_context_parallel: str,
) -> str | None:
    """The first rule that this language layout breaks, or None."""
    lay, p = layout, preset.language
    layers = p.hybrid_layer_pattern
    ranks = lay.tp * lay.cp * lay.dp
    samples = batch.micro_size * lay.dp
    multiple = (2 * lay.cp if lay.cp > 1 else 1) * lay.tp
    heads = {
        "attention heads": p.num_attention_heads,
        "query groups": p.num_query_groups,
    }
    return (
        _first(
            [
                (n % lay.tp > 0, f"tp={lay.tp} must divide the {n} {what}")
                for what, n in heads.items()
            ]
            + [
                (
                    p.num_experts % lay.ep > 0,
                    f"ep={lay.ep} must divide the {p.num_experts} experts",
                ),
                (
                    p.moe_ffn_hidden_size % lay.etp > 0,
                    f"etp={lay.etp} must divide the {p.moe_ffn_hidden_size} FFN rows",
                ),
                (
                    len(layers) % (lay.pp * lay.vpp) > 0 and "|" not in layers,
                    f"pp·vpp = {lay.pp * lay.vpp} must divide the {len(layers)} layers",
                ),
                *recurrent_cp_rules(linear_context_parallel, lay.tp, lay.cp, p),
                (lay.vpp > 1 and lay.pp == 1, f"vpp={lay.vpp} needs pp of 2 or more"),
                (
                    lay.vpp > 1 and batch.global_size // samples % lay.pp > 0,
                    f"with vpp, pp={lay.pp} must divide the {batch.global_size // samples} "
                    "microbatches",
                ),
            ]
        )
        or _size_violation(lay, world_size)
        or _first(
            [
                (
                    ranks % (lay.ep * lay.etp) > 0,
                    f"ep·etp = {lay.ep}·{lay.etp} must divide tp·cp·dp = {ranks}",
                ),
                (
                    batch.seq_length % multiple > 0,
                    f"the sequence length {batch.seq_length} must be a multiple of {multiple} "
                    "(tp, times 2·cp with context parallelism)",
                ),
                (
                    batch.global_size % samples > 0,
                    f"the global batch {batch.global_size} must be a multiple of micro batch × dp "
                    f"= {batch.micro_size}·{lay.dp} = {samples}",
                ),
            ]
        )
    )


def pair_violation(layouts: Layouts) -> str | None:
    """The first rule that the two layouts break together, or None.

    Colocated there is none: the bridge takes any number of rows from each of the encoder's ranks.
    """
    e, lang = layouts.encoder, layouts.language
    rows = layouts.batch.micro_size * lang.dp
    return _first(
        [
            (
                layouts.non_colocated and e.dp % lang.dp > 0 and lang.dp % e.dp > 0,
                f"with --placement {NON_COLOCATED} one of encoder dp={e.dp} and language "
                f"dp={lang.dp} must divide the other: its bridge splits or joins whole slices",
            ),
            (
                layouts.non_colocated and rows % e.dp > 0,
                f"encoder dp={e.dp} must divide the {rows} samples of a microbatch (micro batch "
                f"{layouts.batch.micro_size} × language dp {lang.dp})",
            ),
        ]
    )


def _candidates(world_size: int, axes: list[str]) -> list[Layout]:
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    found = []
    for sizes in itertools.product(divisors, repeat=len(axes)):
        layout = _derive(Layout(**dict(zip(axes, sizes, strict=True))), world_size)
        if layout.size == world_size:
            found.append(layout)
    return found


def _distance(a: Layout, b: Layout) -> float:
    axes = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp")
    return sum(abs(math.log2(getattr(a, axis) / getattr(b, axis))) for axis in axes)


def _listing(fitting: list[Layout], wanted: Layout) -> str:
    if not fitting:
        return "No layout of these ranks fits; change the batch, the sequence length or the ranks"
    near = sorted(set(fitting), key=lambda lay: (_distance(lay, wanted), str(lay)))[:3]
    return "Nearest that fit: " + "  ".join(map(str, near))


def _nearest(
    module: str, wanted: Layout, world: int, violation: Callable[[Layout], str | None]
) -> str:
    others = ("cp", "pp", "ep") if module == "language" else ("pp",)
    axes = ["tp"] + [axis for axis in others if getattr(wanted, axis) > 1]
    plain = _candidates(world, axes)
    etp = None if wanted.etp == wanted.tp else wanted.etp
    same = [replace(c, etp=etp or c.etp, vpp=wanted.vpp) for c in plain]
    return _listing([c for c in (*same, *plain) if not violation(c)], wanted)


def _nearest_encoder(
    layouts: Layouts, world: int, violation: Callable[[Layout], str | None]
) -> str:
    axes = ["tp", "pp"] if layouts.encoder.pp > 1 else ["tp"]
    fitting = [
        c
        for c in _candidates(world, axes)
        if not violation(c) and not pair_violation(replace(layouts, encoder=c))
    ]
    return _listing(fitting, layouts.encoder).replace("that fit", "encoders that fit")


def staged_pattern(pattern: str, layout: Layout) -> str:
    """The layers with ``|`` between (virtual) pipeline stages, which have as many layers each."""
    size = len(pattern) // (layout.pp * layout.vpp)
    return "|".join(pattern[i : i + size] for i in range(0, len(pattern), size))
