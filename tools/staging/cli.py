# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The command line of ``stage_upstream_pr.sh``."""

import argparse
import signal
import sys
from pathlib import Path

from command_line import Parser, numbers
from overlay.cli import REPOSITORY, reported
from overlay.errors import FAILED
from overlay.patchset import PatchSet
from staging.features import Features
from staging.stage import Staging
from staging.trial import try_each


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="stage_upstream_pr.sh",
        description="Make a branch for upstream on a clean git checkout, one commit a feature.",
    )
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    parser.add_argument("checkout", type=Path, nargs="?", metavar="CHECKOUT")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--feature", metavar="NAME", help="it, upon the features that it needs")
    what.add_argument("--all", action="store_true", help="the whole stack")
    what.add_argument(
        "--try", nargs="*", dest="try_", metavar="NAME", help="run the tests of each, staged alone"
    )
    what.add_argument("--graph", action="store_true", help="print the features for the docs")
    parser.add_argument("--branch", metavar="B", help="name of the branch, which is new")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: CHECKOUT-prs/B")
    parser.add_argument("--worlds", type=numbers, metavar="N,…", help="of --try: numbers of ranks")
    return parser


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    features = Features(PatchSet(options.root))
    if options.graph:
        print(features.graph())
        return 0
    trying = options.try_ is not None
    if not options.checkout or trying == bool(options.branch):
        parser.error("CHECKOUT is needed, and --branch but for --try")
    root = options.checkout.resolve()
    out = options.out or root.with_name(f"{root.name}-prs") / (options.branch or "try")
    if trying:
        wanted = [features.get(name, "--try") for name in options.try_] or features.all()
        passed = try_each(Staging(features, root), wanted, options.worlds, out.resolve())
        return 0 if passed else FAILED
    wanted = features.all()
    if options.feature:
        features.get(options.feature)
        wanted = features.stack(options.feature)
    print("\n".join(Staging(features, root).stage(wanted, options.branch, out.resolve())))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 0 if done, 1 if tests failed, else as apply_overlay.sh."""
    parser = _parser()
    options = parser.parse_args(argv)
    # Ending this process must end the ranks of a trial, and leave no worktree.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return reported(lambda: _run(parser, options))
