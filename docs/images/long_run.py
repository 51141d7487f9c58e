# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Compare an interrupted run of docs/user/long-run.md with two whole ones; draw long-run.png.

Usage: python docs/images/long_run.py WHOLE LEGS OTHER DATA [STEP:EVENT]...

The first three are metrics.jsonl: of the whole run, of the same run in legs, and of a whole run
with another seed. DATA has the shards.
"""

import json
import sys
import tarfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

COLOURS = {"whole": "#5b8ff9", "in legs": "#e8684a", "another seed": "#aaaaaa"}
AVERAGED = 50
"""Steps over which a loss is averaged."""

Run = list[dict]


def main(files: list[str], data: str, events: list[str]) -> None:
    """Print how the runs compare, and draw them."""
    runs = [[json.loads(line) for line in Path(file).open()] for file in files]
    tokens = [np.array([record["num_tokens"] for record in run]) for run in runs]
    asked = answer_tokens(data)
    for name, run, counted in zip(COLOURS, runs, tokens, strict=True):
        are_once = [record["step"] for record in run] == list(range(1, len(run) + 1))
        ends = np.flatnonzero(np.cumsum(counted) % asked == 0) + 1
        score = curve(run, "eval_exact_match")[1][-1]
        print(f"{name}: steps 1 to {len(run)} once: {are_once}; read right {score:.1%}")
        print(f"  steps at which all answers have had a loss equally often: {ends.tolist()}")
    print(f"tokens with a loss equal in all steps: {np.array_equal(*tokens[:2])}")
    for key in ("loss", "eval_loss", "eval_exact_match"):
        whole, legs, other = (curve(run, key)[1] for run in runs)
        apart, band = np.abs(whole - legs), np.abs(whole - other)
        found = f"{apart.mean():.2g}, at most {apart.max():.2g}"
        print(f"{key}: apart {found}; of seeds {band.mean():.2g}, at most {band.max():.2g}")
    draw(runs, [event.split(":", 1) for event in events])


def answer_tokens(data: str) -> int:
    """Count the tokens of the answers to train on: letters, spaces, and an end for each answer."""
    count = 0
    for shard in Path(data).glob("train-*.tar"):
        with tarfile.open(shard) as tar:
            texts = [tar.extractfile(file).read() for file in tar if file.name.endswith(".json")]
        answers = [json.loads(text)["conversations"][1]["value"] for text in texts]
        count += sum(len(answer.split()) + 1 for answer in answers)
    return count


def curve(run: Run, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and numbers: means over `AVERAGED` steps, or where the run was evaluated."""
    known = np.array([(record["step"], record[key]) for record in run if key in record])
    if key == "loss":
        known = known[: len(known) // AVERAGED * AVERAGED].reshape(-1, AVERAGED, 2)
        known = np.stack([known[:, -1, 0], known[:, :, 1].mean(1)], axis=1)
    return known[:, 0], known[:, 1]


def draw(runs: list[Run], events: list[list[str]]) -> None:
    """Draw loss and exact match, with a line for each event."""
    figure, (loss, exact) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for (name, colour), run in zip(COLOURS.items(), runs, strict=True):
        loss.plot(*curve(run, "loss"), color=colour, label=name)
        exact.plot(*curve(run, "eval_exact_match"), color=colour, label=name, marker=".")
    loss.set(title=f"loss, means of {AVERAGED} steps", yscale="log", xlabel="step")
    exact.set(title="held-out lines read right", xlabel="step")
    for step, event in events:
        exact.axvline(int(step), color="grey", linestyle=":", linewidth=1)
        loss.axvline(int(step), color="grey", linestyle=":", linewidth=1)
        place = {"transform": loss.get_xaxis_transform(), "rotation": 90, "va": "top"}
        loss.text(int(step), 0.98, event, fontsize=7, ha="right", **place)
    loss.grid(alpha=0.3)
    exact.grid(alpha=0.3)
    exact.legend()
    figure.savefig(Path(__file__).with_name("long-run.png"), dpi=110)


if __name__ == "__main__":
    main(sys.argv[1:4], sys.argv[4], sys.argv[5:])
