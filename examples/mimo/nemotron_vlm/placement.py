# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Where the modules are: both on all ranks, or each on ranks of its own, the encoder first."""

from __future__ import annotations

from examples.mimo.nemotron_vlm.errors import UserError

COLOCATED, NON_COLOCATED = "colocated", "non-colocated"
PLACEMENTS = (COLOCATED, NON_COLOCATED)


def ranks_of_modules(encoder, language, world_size: int, placement: str) -> tuple[int, int]:
    """How many ranks the encoder and the language model have.

    With ranks of their own, a module takes what its layout says; one without ``dp`` takes what the
    other leaves, and an encoder beside a language model without ``dp`` takes one replica.

    Args:
        encoder, language: layouts as asked for; ``dp`` is 0 where it was left out.

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


def layout_table(layouts) -> str:
    """The layout, the ranks and the pipeline stages of each module, a line each."""
    rows = [("module", "layout", "ranks", "stages")]
    first = 0
    for name, layout in (("encoder", layouts.encoder), ("language", layouts.language)):
        ranks = f"{first}-{first + layout.size - 1}" if layout.size > 1 else str(first)
        rows.append((name, str(layout), ranks, str(layout.pp * layout.vpp)))
        if layouts.placement == NON_COLOCATED:
            first += layout.size
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
