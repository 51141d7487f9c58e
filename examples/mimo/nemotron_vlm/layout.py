# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Parallel layouts of the modules: parsing, the rules they must keep, and what would fit instead.

Pure arithmetic: no process, no device. Every rank reaches the same verdict from the same text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from examples.mimo.nemotron_vlm.errors import UserError
from examples.mimo.nemotron_vlm.presets import VLMPreset
from examples.mimo.nemotron_vlm.recurrence import Recurrence


@dataclass(frozen=True)
class Layout:
    """Sizes of one module's axes; ``dp`` 0 means: whatever fills the ranks.

    ``ep`` and ``etp`` factor the same ranks as tp·cp·dp, inside one pipeline stage.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 0
    ep: int = 1
    etp: int = 0
    vpp: int = 1

    @property
    def size(self) -> int:
        """Ranks that the module spans."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def sequence_parallel(self) -> bool:
        """MoE with TP trains only with sequence parallelism, so TP always brings it."""
        return self.tp > 1

    @property
    def expt_dp(self) -> int:
        """Replicas of an expert."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def __str__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        if shown["etp"] in (0, shown["tp"]):
            del shown["etp"]
        return ",".join(f"{k}={v}" for k, v in shown.items() if v != 1 or k in ("tp", "dp"))


@dataclass(frozen=True)
class Batch:
    """Samples a step, samples a microbatch of one language DP rank, and tokens a sample."""

    global_size: int
    micro_size: int
    seq_length: int


@dataclass(frozen=True)
class Layouts:
    """The layouts of both modules over one set of ranks, checked."""

    encoder: Layout
    language: Layout
    batch: Batch
    recurrence: Recurrence = Recurrence()

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step; one takes ``micro_size`` samples on each language DP rank."""
        return self.batch.global_size // (self.batch.micro_size * self.language.dp)


def parse_layout(text: str, module: str) -> Layout:
    """Read ``tp=2,dp=4``.

    Raises:
        UserError: on unknown, repeated or non-positive sizes.
    """
    names = [f.name for f in fields(Layout)]
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        if name not in names or not value.isdigit() or int(value) < 1:
            raise UserError(
                f"--{module} {text}: '{part}' is not AXIS=SIZE with an axis of "
                f"{', '.join(names)} and a size of 1 or more; e.g. --{module} tp=2,dp=4"
            )
        if name in sizes:
            raise UserError(f"--{module} {text}: {name} is given twice; give each axis once")
        sizes[name] = int(value)
    return Layout(**sizes)


def resolve(
    encoder: Layout,
    language: Layout,
    batch: Batch,
    world_size: int,
    preset: VLMPreset,
    recurrence: Recurrence = Recurrence(),  # noqa: B008  frozen
) -> Layouts:
    """Derive what was left out, check every rule, and return the layouts.

    Raises:
        UserError: naming the numbers, the rule, and the nearest layouts that would work.
    """
    encoder, language = _derive(encoder, world_size), _derive(language, world_size)

    def violation(layout: Layout) -> str | None:
        return language_violation(layout, world_size, preset, batch, recurrence)

    for module, layout, broken in (
        ("encoder", encoder, encoder_violation(encoder, world_size, preset)),
        ("language", language, violation(language)),
    ):
        if broken:
            near = _nearest(module, layout, world_size, preset, violation)
            raise UserError(f"--{module} {layout}: {broken}. {near}")
    layouts = Layouts(encoder, language, batch, recurrence)
    if broken := pair_violation(layouts):
        raise UserError(
            f"--encoder {encoder} with --language {language}: {broken}. "
            f"{_nearest_encoder(layouts, world_size, preset)}"
        )
    return layouts


def _derive(layout: Layout, world_size: int) -> Layout:
    dp = layout.dp or max(1, world_size // (layout.tp * layout.cp * layout.pp))
    return replace(layout, dp=dp, etp=layout.etp or layout.tp)


def _size_violation(layout: Layout, world_size: int) -> str | None:
    if layout.size != world_size:
        return (
            f"tp·cp·pp·dp = {layout.tp}·{layout.cp}·{layout.pp}·{layout.dp} = {layout.size} "
            f"must equal the {world_size} ranks"
        )
    return None


def _first(rules: list[tuple[bool, str]]) -> str | None:
    return next((text for broken, text in rules if broken), None)


def encoder_violation(layout: Layout, world_size: int, preset: VLMPreset) -> str | None:
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
                e.cp * e.pp * e.vpp * e.ep > 1 or e.etp != e.tp,
                "an encoder takes tp and dp only",
            ),
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
    recurrence: Recurrence = Recurrence(),  # noqa: B008  frozen
) -> str | None:
    """The first rule that this language layout breaks, or None."""
    lay, p = layout, preset.language
    ranks = lay.tp * lay.cp * lay.dp
    samples = batch.micro_size * lay.dp
    multiple = (2 * lay.cp if lay.cp > 1 else 1) * lay.tp
    heads = {
        "attention heads": p.heads,
        "query groups": p.query_groups,
        "Mamba heads": p.mamba_heads,
        "Mamba groups": p.mamba_groups,
    }
    return _first(
        [
            (n % lay.tp > 0, f"tp={lay.tp} must divide the {n} {what}")
            for what, n in heads.items()
        ]
        + [
            (p.experts % lay.ep > 0, f"ep={lay.ep} must divide the {p.experts} experts"),
            (p.expert_ffn % lay.etp > 0, f"etp={lay.etp} must divide the {p.expert_ffn} FFN rows"),
            (
                len(p.pattern) % (lay.pp * lay.vpp) > 0,
                f"pp·vpp = {lay.pp * lay.vpp} must divide the {len(p.pattern)} layers",
            ),
            *recurrence.rules(lay.tp, lay.cp, p),
            (lay.vpp > 1 and lay.pp == 1, f"vpp={lay.vpp} needs pp of 2 or more"),
            (
                lay.vpp > 1 and batch.global_size // samples % lay.pp > 0,
                f"with vpp, pp={lay.pp} must divide the {batch.global_size // samples} "
                "microbatches",
            ),
        ]
    ) or _size_violation(lay, world_size) or _first(
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
                f"the global batch {batch.global_size} must be a multiple of micro batch × dp = "
                f"{batch.micro_size}·{lay.dp} = {samples}",
            ),
        ]
    )


def pair_violation(layouts: Layouts) -> str | None:
    """The first rule that the two layouts break together, or None."""
    e, lang = layouts.encoder, layouts.language
    if lang.pp > 1:
        samples, whose = layouts.batch.global_size, "the global batch"
    else:
        samples = layouts.batch.micro_size * lang.dp
        whose = f"a microbatch (micro batch {layouts.batch.micro_size} × language dp {lang.dp})"
    return _first(
        [
            (
                e.dp % lang.dp > 0 and lang.dp % e.dp > 0,
                f"one of encoder dp={e.dp} and language dp={lang.dp} must divide the other",
            ),
            (
                samples % e.dp > 0,
                f"encoder dp={e.dp} must divide the {samples} samples of {whose}",
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
    axes = ("tp", "cp", "pp", "dp", "ep")
    return sum(abs(math.log2(getattr(a, axis) / getattr(b, axis))) for axis in axes)


def _listing(fitting: list[Layout], wanted: Layout) -> str:
    if not fitting:
        return "No layout of these ranks fits; change the batch, the sequence length or the ranks"
    near = sorted(set(fitting), key=lambda lay: (_distance(lay, wanted), str(lay)))[:3]
    return "Nearest that fit: " + "  ".join(map(str, near))


def _nearest(
    module: str,
    wanted: Layout,
    world: int,
    preset: VLMPreset,
    violation: Callable[[Layout], str | None],
) -> str:
    if module == "encoder":
        fitting = [c for c in _candidates(world, ["tp"]) if not encoder_violation(c, world, preset)]
    else:
        axes = ["tp"] + [axis for axis in ("cp", "pp", "ep") if getattr(wanted, axis) > 1]
        fitting = [c for c in _candidates(world, axes) if not violation(c)]
    return _listing(fitting, wanted)


def _nearest_encoder(layouts: Layouts, world_size: int, preset: VLMPreset) -> str:
    fitting = [
        c
        for c in _candidates(world_size, ["tp"])
        if not encoder_violation(c, world_size, preset)
        and not pair_violation(replace(layouts, encoder=c))
    ]
    return _listing(fitting, layouts.encoder).replace("that fit", "encoders that fit")
