# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Draw the measurements of tools/bench/vlm.py, and print them as a table in Markdown.

Usage: python tools/bench/draw.py docs/benchmarks/*.json --png docs/images/benchmarks.png
"""

import argparse
import json
from pathlib import Path

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

COLUMNS = "row|run|GPUs|s/step|tokens/s a GPU|TFLOP/s a GPU|of peak|ratio|GiB".split("|")
HEAD = f"| {' | '.join([*COLUMNS, *PARTS])} |\n|---|---|"
HEAD += "---:|" * (len(COLUMNS) - 2 + len(PARTS))
"""Head of the table in Markdown."""


def main() -> None:
    """Read the files, print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--png", type=Path, required=True)
    own = parser.parse_args()
    rows = [json.loads(file.read_text()) for file in own.files]
    print("\n".join([HEAD, *(line(row, run) for row in rows for run in row["runs"])]))
    draw(rows, own.png)


def line(row: dict, run: dict) -> str:
    """Return a run's line; its ratio is of tokens/s a GPU to the first run of the row."""
    ratio = run["tokens_per_s_per_gpu"] / row["runs"][0]["tokens_per_s_per_gpu"]
    peak_gib = run["peak_memory_gib"]
    cells = [
        row["title"],
        run["name"],
        str(run["ranks"]),
        f"{run['step_s']:.3f}",
        f"{run['tokens_per_s_per_gpu']:.0f}",
        f"{run['tflops_per_gpu']:.0f}",
        f"{run['tflops_per_gpu'] / PEAK:.1%}",
        f"{ratio:.2f}",
        "–" if peak_gib is None else f"{peak_gib:.0f}",
        *("–" if share is None else f"{share:.1%}" for share in shares(run).values()),
    ]
    return f"| {' | '.join(cells)} |"


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
