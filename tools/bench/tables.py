# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of measured runs: the one that is printed, and those of README.md and the users' page."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEAK = 989
"""Dense bf16 TFLOP/s of an H100 or H200, from NVIDIA's data sheet."""

MARK = "<!-- measured -->\n"
SPEED = "GPUs|s/step|tokens/s a GPU|TFLOP/s a GPU|of peak".split("|")
PRINTED = ["run", *SPEED, "ratio", "GiB", "waiting for data"]

PARTLY = "--freeze", "--lora-dim"
"""Options with which a step does less than is counted: gradients of frozen weights are not made."""

HEADLINE = {
    ("real-heads", "now, expandable segments"): (
        "packed conversations, images of any size, clips and sounds, dp=2, CUDA graphs, expandable "
        "segments"
    ),
    ("real-heads", "before"): "an earlier program, without graphs, one microbatch encoded at once",
    ("published", "align, CUDA graphs"): "the published 33.0 B on such rows, projectors trained",
    ("published", "LoRA, CUDA graphs"): "the same, adapters of rank 16 on all linear layers, too",
    ("published", "full fine-tuning"): (
        "the same, language model and projectors, 32 rows, Adam's state on the host"
    ),
    ("fp8", "bf16"): "tiles of one size, encoder 79 % of the work, CUDA graphs",
    ("upstream-768", "this program"): "images of 768×768, both modules dp=2, CUDA graphs",
    ("upstream-768", "upstream's"): "the same, upstream's script, a GPU for each module",
}
"""Runs of the pages' tables, by row and name, and their words."""


def write() -> None:
    """Put the tables of docs/benchmarks/*.json into the pages."""
    for page, table in tables().items():
        path = ROOT / page
        path.write_text(with_table(path.read_text(), table))


def tables() -> dict[str, str]:
    """Return the table of each page, in Markdown."""
    rows = [json.loads(file.read_text()) for file in (ROOT / "docs/benchmarks").glob("*.json")]
    runs = {(row["row"], run["name"]): run for row in rows for run in row["runs"]}
    readme, page = [head(["run", *SPEED])], [head(["run", *SPEED, "GiB", "row"])]
    for key, words in HEADLINE.items():
        cells, figures = [words, *_speed(runs[key])], f"[`{key[0]}`](../benchmarks/{key[0]}.json)"
        readme.append(_joined(cells))
        page.append(_joined([*cells, _memory(runs[key]), figures]))
    return {"README.md": "\n".join(readme), "docs/user/benchmarks.md": "\n".join(page)}


def with_table(text: str, table: str) -> str:
    """Return a page's text with a table in the place of the one below ``MARK``."""
    before, after = text.split(MARK)
    return before + MARK + table + "\n\n" + after.partition("\n\n")[2]


def head(names: list[str]) -> str:
    """Return the two first lines of a table whose columns are numbers but for the first."""
    return f"{_joined(names)}\n|---|" + "---:|" * (len(names) - 1)


def line(run: dict, first: dict) -> str:
    """Return a run's line; its ratio is of tokens/s a GPU to the first run of the row."""
    ratio = run["tokens_per_s_per_gpu"] / first["tokens_per_s_per_gpu"]
    waited = "–" if run["data_wait"] is None else _percent(run["data_wait"])
    return _joined([run["name"], *_speed(run), f"{ratio:.2f}", _memory(run), waited])


def _speed(run: dict) -> list[str]:
    found = [str(run["ranks"]), f"{run['step_s']:.3f}", f"{run['tokens_per_s_per_gpu']:,.0f}"]
    if any(option in run["arguments"] for option in PARTLY):
        return [*found, "–", "–"]
    return [*found, f"{run['tflops_per_gpu']:.0f}", _percent(run["tflops_per_gpu"] / PEAK)]


def _memory(run: dict) -> str:
    peak_gib = run["peak_memory_gib"]
    return "–" if peak_gib is None else f"{peak_gib:.0f}"


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def _joined(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
