# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Entry point: ``python tools/staging CHECKOUT``, by ``stage_upstream_pr.sh``."""

import argparse
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from command_line import Parser  # noqa: E402
from overlay.checkout import Checkout  # noqa: E402
from overlay.cli import REPOSITORY, reported  # noqa: E402
from overlay.errors import FAILED  # noqa: E402
from overlay.patchset import PatchSet  # noqa: E402
from staging.features import Features  # noqa: E402
from staging.stage import Staging, try_each  # noqa: E402


def _run(options: argparse.Namespace) -> int:
    version = Checkout(options.checkout).version if options.checkout else ""
    features = Features(PatchSet(options.root), version)
    if options.list:
        print("\n".join(f"{one.name}: {one.title}" for one in features.by_name.values()))
        return 0
    staging = Staging(features, options.checkout.resolve())
    if options.branch:
        print("\n".join(staging.stage(features.stack(*options.feature), options.branch)))
        return 0
    names = options.feature or list(features.by_name)
    return 0 if try_each(staging, features.named(names)) else FAILED


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 0 if done, 1 if tests failed, else as apply_overlay.sh."""
    parser = Parser(
        prog="stage_upstream_pr.sh",
        description="Make a branch for upstream on a clean git checkout, one commit a feature.",
    )
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    parser.add_argument("checkout", type=Path, nargs="?", metavar="CHECKOUT")
    parser.add_argument("feature", nargs="*", metavar="FEATURE", help="default: all")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--branch", metavar="B", help="make this branch, which is new, of features")
    what.add_argument("--try", action="store_true", help="run the tests of each, staged alone")
    what.add_argument("--list", action="store_true", help="name the features")
    options = parser.parse_args(argv)
    if not (options.checkout or options.list):
        parser.error("CHECKOUT is needed")
    # Ending this process must end the ranks of a trial, and leave no worktree.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return reported(lambda: _run(options))


if __name__ == "__main__":
    sys.exit(main())
