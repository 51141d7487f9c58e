# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Commit messages, PR descriptions, and the graph of features as text."""

import textwrap
from pathlib import PurePosixPath

from staging.features import TESTS, Feature, Features

_PLUGIN = "rank_agreement"


def message(feature: Feature) -> str:
    """Return the message of a feature's commit."""
    paragraphs = [feature.what, feature.why, feature.design]
    return "\n\n".join([feature.title, *(textwrap.fill(text, 72) for text in paragraphs)])


def pr_text(features: Features, feature: Feature) -> str:
    """Return the description of a feature's PR, in Markdown."""
    tests = sorted(features.tests_of(feature))
    lines = [f"# {feature.title}", "", "## What", "", feature.what, "", "## Why", "", feature.why]
    lines += ["", "## Design", "", feature.design, "", "## Tests", ""]
    lines += [f"- `{path}`" for path in tests]
    if feature.fails:
        lines += ["", f"Without this change, `{TESTS}/{feature.fails}` fails."]
    lines += ["", "How to run them, on GPUs or without:", "", "```", *setting(features, feature)]
    lines += [*commands(features, feature).values(), "```", ""]
    if feature.upstream:
        lines += ["Existing tests of the files that change:", ""]
        lines += [f"- `{path}`" for path in feature.upstream] + [""]
    lines += ["## Depends on", ""]
    needs = [f"- {features.get(name).title} (`{name}`)" for name in feature.needs]
    return "\n".join(lines + (needs or ["nothing"])) + "\n"


def setting(features: Features, feature: Feature) -> list[str]:
    """Return the shell lines that come before the commands: the environment, and `tests`."""
    files = [path for path in sorted(features.tests_of(feature)) if _is_test(path)]
    lines = ["export PYTHONPATH=. OMP_NUM_THREADS=1", "export TRITON_INTERPRET=1  # without a GPU"]
    return [*lines, f"tests=({' '.join(files)})"]


def commands(features: Features, feature: Feature) -> dict[int, str]:
    """Return the commands for a feature's tests by number of ranks.

    Upstream's conftest is left out because it downloads data.
    """
    below = {path for one in features.stack(feature.name) for path in features.tests_of(one)}
    plugin = [f"-p {TESTS}.{_PLUGIN}".replace("/", ".")]
    if f"{TESTS}/{_PLUGIN}.py" not in below:
        plugin = []
    options = " ".join(["--noconftest", *plugin])
    programs = {
        size: "python" if size == 1 else f"torchrun --nproc-per-node {size}"
        for size in features.ranks_of(feature)
    }
    return {n: f'{program} -m pytest {options} "${{tests[@]}}"' for n, program in programs.items()}


def _is_test(path: str) -> bool:
    return PurePosixPath(path).name.startswith("test_")


def graph(features: Features) -> str:
    """Return the graph of features for the docs: a drawing, and a table of patches."""
    lines = ["```mermaid", "graph BT"]
    alone = [f for f in features.all() if not f.needs]
    for feature in features.all():
        lines += [f"    {feature.name} --> {need}" for need in feature.needs]
    used = {need for feature in features.all() for need in feature.needs}
    lines += [f"    {feature.name}" for feature in alone if feature.name not in used]
    lines += [
        "```",
        "",
        "| feature | patches | fails without it, for upstream's bug |",
        "|---|---|---|",
    ]
    for feature in features.all():
        fails = f"`{feature.fails}`" if feature.fails else ""
        patches = ", ".join(feature.patches)
        lines.append(f"| `{feature.name}`: {feature.title} | {patches} | {fails} |")
    return "\n".join(lines)
