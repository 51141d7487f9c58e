# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The command line."""

import argparse
import json
import signal
import sys
from pathlib import Path

from upstream_tests import report
from upstream_tests.comparison import Runner, say
from upstream_tests.selection import Selection, matching
from upstream_tests.trees import Overlay, TreeError, check

REPOSITORY = Path(__file__).resolve().parents[2]
LOST, USAGE = 1, 2


def _worlds(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="upstream_tests.sh",
        description="Run upstream's own tests on a pristine and on an applied copy of CHECKOUT.",
    )
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="git checkout of upstream")
    parser.add_argument("--worlds", type=_worlds, metavar="N,…", help="default: 1,2,4,8")
    parser.add_argument("--only", metavar="PATTERN", help="files and areas with it in their name")
    parser.add_argument("--baseline", action="store_true", help="run the pristine copy only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome there")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="repository of the patch set")
    return parser


def _run(options: argparse.Namespace) -> int:
    root, checkout = options.root.resolve(), options.checkout.resolve()
    check(checkout)
    work = root / "build/upstream-tests"
    overlay = Overlay(root)
    pristine = overlay.pristine_copy(checkout, work / "pristine")
    applied = None if options.baseline else overlay.applied_copy(pristine, work / "applied")
    selection = Selection.read(Path(__file__).parent / "selection.toml")
    files = matching(selection.files(pristine), options.only)
    if not files:
        say(f"error: no selected test file or area has {options.only!r} in its name")
        return USAGE
    runtime = root / "megatron_overlay/megatron/core/cpu_runtime"
    worlds = options.worlds or list(selection.worlds)
    found = Runner(work, runtime, selection, files, worlds).compare(pristine, applied)
    print("\n".join(report.summary(found, files, selection)))
    if options.json:
        options.json.write_text(json.dumps(report.as_json(found, selection), indent=1) + "\n")
    return LOST if any(found.lost.values()) else 0


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 nothing lost · 1 tests lost · 2 usage · else what refused the checkout."""
    options = _parser().parse_args(argv)
    # Ending this process must end the ranks too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _run(options)
    except TreeError as error:
        say(f"error: {error}")
        return error.code
