# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Layouts of the modules, their form on the command line, and tables of them."""

import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

from examples.mimo.common.errors import UserError

PLACEMENTS = COLOCATED, NON_COLOCATED = "colocated", "non-colocated"
"""All modules on all ranks; or encoders on the first ranks, the language model on the rest."""

PLANNED = "planned"
"""Value of ``--language`` with which the planner chooses all layouts."""

TOKEN_MULTIPLE = "tp, times 2·cp with context parallelism"


SIZES = {
    "language": {
        "tp": "tensor_model_parallel_size",
        "cp": "context_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
    },
    "encoder": {"tp": "encoder_tp", "dp": "encoder_dp", "pp": "encoder_pp"},
}
"""Names of the arguments that set single axes of a module's layout."""


@dataclass(frozen=True)
class Layout:
    """Sizes of one module's axes; 0 for ``dp`` means: as many as fill the ranks.

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
        """Whether the module has sequence parallelism: with TP always, as MoE needs it to train."""
        return self.tp > 1

    @property
    def token_multiple(self) -> int:
        """Number that must divide the tokens of a row, see ``TOKEN_MULTIPLE``."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    @property
    def expt_dp(self) -> int:
        """Number of replicas of an expert."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def __str__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        usual = {"tp": None, "dp": None, "etp": self.tp if self.etp else 0}
        return ",".join(f"{k}={v}" for k, v in shown.items() if v != usual.get(k, 1))


@dataclass(frozen=True)
class Batch:
    """Samples of a step, samples of a microbatch on a language DP rank, and tokens of a sample."""

    global_size: int
    micro_size: int
    seq_length: int


@dataclass(frozen=True)
class Layouts:
    """The checked layouts of all modules: on the same ranks, or each on its own.

    encoders: in the order of the model's encoders.
    """

    encoders: tuple[Layout, ...]
    language: Layout
    batch: Batch
    placement: str = COLOCATED

    @property
    def encoder(self) -> Layout:
        """Layout of a model's only encoder."""
        (layout,) = self.encoders
        return layout

    @property
    def non_colocated(self) -> bool:
        """Whether each module has its own ranks."""
        return self.placement == NON_COLOCATED

    @property
    def modules(self) -> tuple[Layout, ...]:
        """Layouts of the encoders and of the language model."""
        return (*self.encoders, self.language)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First ranks of the encoders and of the language model."""
        if not self.non_colocated:
            return (0,) * len(self.modules)
        return tuple(accumulate((each.size for each in self.encoders), initial=0))

    def named_encoders(self, names: Sequence[str]) -> list[str]:
        """Return the encoders' layouts as ``--encoder`` takes them, without an only one's name."""
        if len(self.encoders) == 1:
            return [str(self.encoder)]
        return [f"{name}:{layout}" for name, layout in zip(names, self.encoders, strict=True)]

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step; one takes ``micro_size`` samples on each language DP rank."""
        return self.batch.global_size // (self.batch.micro_size * self.language.dp)


def option_of(name: str) -> str:
    """Return the option of an argument."""
    return f"--{name.replace('_', '-')}"


def parse_layout(text: str, module: str) -> Layout:
    """Parse a layout such as ``tp=2,dp=4``.

    Raises:
        UserError: an axis is unknown or repeated, or a size is not positive.
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


def asked_layout(args: Namespace, module: str, text: str | None = None) -> Layout:
    """Return a module's layout from its short form and the options of single axes.

    Args:
        module: 'encoder' or 'language'.
        text: the short form; that of the option named as the module by default.

    Raises:
        UserError: the short form cannot be read, or an option differs from it.
    """
    text = getattr(args, module) if text is None else text
    layout, given = parse_layout(text, module), re.findall(r"\w+(?==)", text)
    for axis, name in SIZES[module].items():
        short, size = getattr(layout, axis), getattr(args, name)
        if size is not None and axis in given and short != size:
            raise UserError(f"--{module} says {axis}={short}, and {option_of(name)} says {size}")
        layout = replace(layout, **{axis: short if size is None else size})
    return layout


def layout_table(layouts: Layouts, encoders: Sequence[str] = ()) -> str:
    """Return a table with the layout, the ranks and the pipeline stages of each module.

    Args:
        encoders: names of the encoders, shown if there are several.
    """
    rows = [["module", "layout", "ranks", "stages"]]
    names = *(encoders if len(layouts.encoders) > 1 else ["encoder"]), "language"
    for name, layout, first in zip(names, layouts.modules, layouts.offsets, strict=True):
        ranks = f"{first}-{first + layout.size - 1}" if layout.size > 1 else str(first)
        rows.append([name, str(layout), ranks, str(layout.pp * layout.vpp)])
    return table(rows)


def table(rows: list[list[object]]) -> str:
    """Return the rows as text, with aligned columns."""
    texts = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in texts)
    return "\n".join(line.rstrip() for line in lines)
