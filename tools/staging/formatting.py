# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Upstream's own formatters, with the settings in the checkout's pyproject.toml."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from overlay.errors import FAILED, OverlayError

_TOOLS = {"isort": r"ERROR: (.+?) Imports are", "black": r"would reformat (.+)"}
"""Formatters, each with the pattern of its output for a file that it would change."""


def check_tools() -> None:
    """Raise OverlayError unless the formatters are installed."""
    if lost := [tool for tool in _TOOLS if importlib.util.find_spec(tool) is None]:
        raise OverlayError(
            FAILED, f"{' and '.join(lost)} missing in {sys.executable}: pip install '.[staging]'"
        )


def unclean(tree: Path, paths: list[str]) -> dict[str, set[str]]:
    """Return the files that each formatter would change, which upstream leaves as they are."""
    found = {}
    for tool, line in _TOOLS.items():
        python = [path for path in paths if path.endswith(".py")]
        done = _run(tree, tool, "--check", *python) if python else None
        output = done.stdout + done.stderr if done else ""
        found[tool] = {
            path for path in python if any(Path(p).match(path) for p in re.findall(line, output))
        }
    return found


def format_files(tree: Path, paths: list[str], left: dict[str, set[str]]) -> None:
    """Format files of a tree in place, except those that ``left`` has for each formatter."""
    for tool in _TOOLS:
        wanted = [path for path in paths if path.endswith(".py") and path not in left[tool]]
        if not wanted:
            continue
        done = _run(tree, tool, "--quiet", *wanted)
        if done.returncode:
            reason = done.stderr.strip().splitlines() or ["no reason given"]
            raise OverlayError(FAILED, f"{tool} failed: {reason[-1]}")


def _run(tree: Path, tool: str, *args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", tool, *args]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)
