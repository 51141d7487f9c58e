# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Write the measurements of tools/bench/vlm.py into the pages that show them, and draw them.

    python tools/bench/draw.py

It reads docs/benchmarks/*.json and makes anew the tables of docs/user/benchmarks.md and README.md,
and docs/images/benchmarks.png.
"""

import json
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEAK = 989
"""Dense bf16 TFLOP/s of an H100 or H200, from NVIDIA's data sheet."""

PARTS = {
    "data": "#f6bd16",
    "idle": "#e8684a",
    "exposed": "#9270ca",
    "bridge": "#5b8ff9",
    "optimizer": "#5ad8a6",
}
"""Shares of a step and their colours: data is waiting for it, exposed is communication alone."""

SPEED = "GPUs|s/step|tokens/s a GPU|TFLOP/s a GPU|of peak".split("|")
WAITS = list(PARTS)[:3]
REST = ["ratio", "GiB", *WAITS]
HEAD = f"| row | run | {' | '.join([*SPEED, *REST])} |\n|---|---|"
HEAD += "---:|" * len([*SPEED, *REST])
"""Head of the table that vlm.py prints, in Markdown."""

HEADLINE = {
    ("real", "dp=2"): "packed conversations, images of any size, clips and sounds, dp=2",
    ("real", "language frozen"): "the same, language model frozen",
    ("fp8", "bf16"): "tiles of one size, encoder 79 % of the work, CUDA graphs",
    ("fp8", "both, delayed, experts in bf16"): "the same in FP8",
    ("two-gpus-graphs", "two"): "the same in bf16, both modules dp=2",
    ("heterogeneous-50-graphs", "encoder dp=2"): (
        "encoder 50 % of the work, dp=2, language tp=2 ep=2, CUDA graphs"
    ),
    ("experts-128", "ep=2, graphs"): "13 B parameters, 128 experts, dp=2, ep=2, CUDA graphs",
    ("context-32k-graphs", "cp=2"): "rows of 32k tokens, encoder dp=2, language cp=2, CUDA graphs",
    ("upstream-768", "this program"): "images of 768×768, both modules dp=2, CUDA graphs",
    ("upstream-768", "upstream's, 4 samples"): "the same, upstream's script, a GPU for each module",
}
"""Runs of the pages' tables, by row and name, and their words."""


def main() -> None:
    """Write the tables and the picture."""
    rows = measured()
    for page, table in tables(rows).items():
        path = ROOT / page
        path.write_text(with_table(path.read_text(), table))
    draw(rows, ROOT / "docs/images/benchmarks.png")


def measured() -> list[dict]:
    """Return the rows of docs/benchmarks, in the order of vlm.toml."""
    order = list(tomllib.loads(Path(__file__).with_name("vlm.toml").read_text())["row"])
    rows = [json.loads(file.read_text()) for file in (ROOT / "docs/benchmarks").glob("*.json")]
    return sorted(rows, key=lambda row: order.index(row["row"]) if row["row"] in order else -1)


def tables(rows: list[dict]) -> dict[str, str]:
    """Return the table of each page, in Markdown."""
    runs = {(row["row"], run["name"]): run for row in rows for run in row["runs"]}
    headline = [f"| run | {' | '.join(SPEED)} |", "|---|" + "---:|" * len(SPEED)]
    page = [f"{headline[0]} GiB | row |", f"{headline[1]}---:|---|"]
    for key, words in HEADLINE.items():
        run, figures = runs[key], f"[`{key[0]}`](../benchmarks/{key[0]}.json)"
        headline.append(_joined(words, *_speed(run)))
        page.append(_joined(words, *_speed(run), _memory(run), figures))
    return {"README.md": "\n".join(headline), "docs/user/benchmarks.md": "\n".join(page)}


def with_table(text: str, table: str) -> str:
    """Return a page's text with a table in the place of the first one after ``<!-- measured -->``.

    Raises:
        ValueError: the page has no such place.
    """
    before, mark, after = text.partition("<!-- measured -->\n")
    if not mark:
        raise ValueError("a page has no <!-- measured -->")
    _, end, rest = after.partition("\n\n")
    return before + mark + table + end + rest


def line(row: dict, run: dict) -> str:
    """Return a run's line; its ratio is of tokens/s a GPU to the first run of the row."""
    first = row["runs"][0]
    ratio = run["tokens_per_s_per_gpu"] / first["tokens_per_s_per_gpu"]
    title = row["title"] if run is first else ""
    parts = (shares(run)[name] for name in WAITS)
    waits = ("–" if share is None else _percent(share) for share in parts)
    return _joined(title, run["name"], *_speed(run), f"{ratio:.2f}", _memory(run), *waits)


def _speed(run: dict) -> list[str]:
    return [
        str(run["ranks"]),
        f"{run['step_s']:.3f}",
        f"{run['tokens_per_s_per_gpu']:,.0f}",
        f"{run['tflops_per_gpu']:.0f}",
        _percent(run["tflops_per_gpu"] / PEAK),
    ]


def _memory(run: dict) -> str:
    peak_gib = run["peak_memory_gib"]
    return "–" if peak_gib is None else f"{peak_gib:.0f}"


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def _joined(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def shares(run: dict) -> dict[str, float | None]:
    """Return shares of the first GPU's step by part; idle does not include waiting for data."""
    idle = None if run["idle"] is None else max(0.0, run["idle"] - run["data_wait"])
    return {"data": run["data_wait"], "idle": idle} | {n: run[n] for n in tuple(PARTS)[2:]}


def draw(rows: list[dict], png: Path) -> None:
    """Draw bars of TFLOP/s a GPU, and of the shares of a step that are not computation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [(row, run) for row in rows for run in row["runs"]]
    names = [f"{row['row']}: {run['name']}" for row, run in runs]
    places = range(len(runs))
    figure, (speed, parts) = plt.subplots(
        1, 2, sharey=True, figsize=(11, 1 + 0.32 * len(runs)), layout="constrained"
    )
    speed.barh(places, [run["tflops_per_gpu"] for _, run in runs], color="#5b8ff9")
    speed.axvline(0.4 * PEAK, color="grey", linestyle=":")
    speed.set_yticks(places, names, fontsize=8)
    speed.invert_yaxis()
    speed.set_xlabel(f"TFLOP/s a GPU; dotted: 40 % of {PEAK}")
    left = [0.0] * len(runs)
    for part, colour in PARTS.items():
        widths = [shares(run)[part] or 0.0 for _, run in runs]
        parts.barh(places, widths, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    parts.set_xlabel("share of a step")
    parts.legend(fontsize=8)
    figure.savefig(png, dpi=110)


if __name__ == "__main__":
    main()
