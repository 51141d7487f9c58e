# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Fetch Megatron-LM, apply the patch set, refresh it, or compare it with another version."""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from command_line import Parser  # noqa: E402
from overlay import rules  # noqa: E402
from overlay.apply import run as apply  # noqa: E402
from overlay.checkout import Checkout  # noqa: E402
from overlay.errors import FAILED, OverlayError  # noqa: E402
from overlay.fetch import fetch  # noqa: E402
from overlay.patchset import Lock, PatchSet  # noqa: E402
from overlay.refresh import refresh  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="overlay", description=__doc__)
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="repository of the patch set")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("apply", help="put the overlay onto a checkout")
    one.add_argument("checkout", type=Path, metavar="CHECKOUT")
    how = one.add_mutually_exclusive_group()
    for flag, text in (
        ("--check", "dry run: say what would change"),
        ("--status", "say what is applied"),
        ("--revert", "give the originals back"),
        ("--link", "symlink the overlay's files"),
    ):
        how.add_argument(flag, dest="how", action="store_const", const=flag[2:], help=text)
    one = commands.add_parser("fetch", help="fetch a locked upstream")
    one.add_argument("directory", type=Path, nargs="?", metavar="DIR")
    which = one.add_mutually_exclusive_group()
    which.add_argument("--version", metavar="V", help="another version of the lock than the pin")
    text = "the lock's commit of main, from a git directory that has it"
    which.add_argument("--next", type=Path, metavar="GITDIR", help=text)
    one = commands.add_parser("refresh", help="write patches and lock anew")
    one.add_argument("checkout", type=Path, nargs="?", metavar="CLONE", help="has git-only files")
    one.add_argument("--check", action="store_true", help="change nothing, fail if it would")
    one = commands.add_parser("drift", help="what another Megatron-LM means for us")
    one.add_argument("checkout", type=Path, metavar="CHECKOUT")
    commands.add_parser("headers", help="check the headers and sizes of the patches")
    return parser


def reported(main: Callable[..., int]) -> Callable[..., int]:
    """Let a program print why it refuses, and return the refusal's exit code."""

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        try:
            return main(argv)
        except OverlayError as error:
            lines, code = error.lines, error.code
        except OSError as error:
            where = error.filename2 or error.filename  # none of a pipe, or of a lock
            lines, code = [f"{where}: {error.strerror}" if where else error.strerror], FAILED
        for line in lines:
            print(f"error: {line}", file=sys.stderr)
        return code

    return run


@reported
def main(argv: list[str] | None = None) -> int:
    """Run a command and print its lines; return the exit code."""
    options = _parser().parse_args(argv)
    root, code = options.root, 0
    checkout = Checkout(options.checkout) if getattr(options, "checkout", None) else None
    if options.command == "fetch":
        lock = Lock.read(root / "patches/upstream.toml")
        directory = options.directory or root / "build" / "Megatron-LM"
        lines = [fetch(lock, root, directory, options.version, options.next)]
    elif options.command == "headers":
        lines = [rules.check(PatchSet(root))]
    elif options.command == "refresh":
        lines = refresh(PatchSet(root), checkout, options.check)
    elif options.command == "drift":
        try:
            from overlay.drift import drift
        except ImportError:
            what = "no griffe: run make setup, or pip install griffelib"
            raise OverlayError(FAILED, what) from None
        lines, code = drift(PatchSet(root), checkout)
    else:
        lines = apply(PatchSet(root), checkout, options.how)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
