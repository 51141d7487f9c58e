# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Compare the long run that was interrupted with two that were not, and draw long-run.png.

Usage: python docs/images/long_run.py WHOLE LEGS OTHER [EVENTS]

The first three are metrics.jsonl of runs: whole; of the same seed, but interrupted; and whole, of
another seed. EVENTS is a file of lines STEP TEXT.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

NAMES = ("whole", "interrupted", "another seed")
COLOURS = ("#5b8ff9", "#e8684a", "#aaaaaa")
AVERAGED = 50
"""Steps over which a loss is averaged."""
SCORES = {"eval_loss": "loss of held-out lines", "eval_exact_match": "held-out lines read right"}


def main() -> None:
    """Print how the runs compare, and draw them."""
    runs = [[json.loads(line) for line in Path(file).open()] for file in sys.argv[1:4]]
    events = Path(sys.argv[4]).read_text().splitlines() if len(sys.argv) > 4 else []
    for name, run in zip(NAMES, runs, strict=True):
        once = [record["step"] for record in run] == list(range(1, len(run) + 1))
        print(
            f"{name}: {len(run)} steps, each once: {once}; {run[-1]['eval_exact_match']:.1%} right"
        )
    whole, legs, other = ([record["num_tokens"] for record in run] for run in runs)
    print(
        f"answer tokens of every step equal: {whole == legs}; with another seed: {whole == other}"
    )
    for key, values in {"loss": averaged, **dict.fromkeys(SCORES, scores)}.items():
        of = [values(run, key) for run in runs]
        apart, band = (np.abs(of[0][1] - each[1]) for each in of[1:])
        print(f"{key}: apart {apart.mean():.4f}, another seed {band.mean():.4f} (means)")
    draw(runs, [event.split(" ", 1) for event in events])


def averaged(run: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps, and the means of a number over so many of them."""
    values = np.array([record[key] for record in run])
    means = values[: len(values) // AVERAGED * AVERAGED].reshape(-1, AVERAGED).mean(1)
    return np.arange(1, len(means) + 1) * AVERAGED, means


def scores(run: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that were evaluated, and their scores."""
    known = [(record["step"], record[key]) for record in run if key in record]
    return tuple(np.array(column) for column in zip(*known, strict=True))


def draw(runs: list[list[dict]], events: list[list[str]]) -> None:
    """Draw loss and exact match, and a line for each event."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for name, colour, run in reversed(list(zip(NAMES, COLOURS, runs, strict=True))):
        axes[0].plot(*averaged(run, "loss"), label=name, color=colour)
        axes[1].plot(*scores(run, "eval_exact_match"), label=name, color=colour, marker=".")
    axes[0].set(yscale="log", title=f"loss, means of {AVERAGED} steps")
    axes[1].set(title=SCORES["eval_exact_match"])
    for each in axes:
        each.set_xlabel("step")
        each.grid(alpha=0.3)
        for step, text in events:
            each.axvline(int(step), color="grey", linestyle=":", linewidth=1)
            if each is axes[0]:
                place = (int(step), 1), each.get_xaxis_transform()
                each.text(
                    *place[0], f" {text}", transform=place[1], fontsize=7, va="top", rotation=90
                )
    axes[1].legend()
    figure.savefig(Path(__file__).with_name("long-run.png"), dpi=110)


if __name__ == "__main__":
    main()
