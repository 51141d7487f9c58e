# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The command line."""

import argparse
import sys
from pathlib import Path

from overlay import operations
from overlay.checkout import Checkout
from overlay.errors import FAILED, USAGE, OverlayError
from overlay.export import Pristine, check_patches, export, relock
from overlay.fetch import fetch
from overlay.patchset import Lock, PatchSet

REPOSITORY = Path(__file__).resolve().parents[2]


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(USAGE, f"error: {message} (see --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="overlay", description=__doc__)
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="repository of the patch set")
    commands = parser.add_subparsers(dest="command", required=True)

    one = commands.add_parser("apply", help="put the overlay onto a checkout")
    one.add_argument("checkout", type=Path, metavar="CHECKOUT")
    how = one.add_mutually_exclusive_group()
    how.add_argument("--check", action="store_true", help="dry run: say what would change")
    how.add_argument("--status", action="store_true", help="say what is applied")
    how.add_argument("--revert", action="store_true", help="give the originals back")
    how.add_argument("--link", action="store_true", help="symlink the overlay's files")

    one = commands.add_parser("fetch", help="fetch the pinned upstream")
    one.add_argument("directory", type=Path, nargs="?", metavar="DIR")
    one.add_argument("--git", metavar="REMOTE", help="clone the tag from REMOTE instead")

    one = commands.add_parser("lock", help="normalise patches, list them in series, write the lock")
    one.add_argument("--check", action="store_true", help="change nothing, fail if it would")
    _add_upstream(one)

    one = commands.add_parser("export", help="regenerate the patches from an applied checkout")
    one.add_argument("checkout", type=Path, metavar="CHECKOUT")
    one.add_argument("--into", metavar="NNNN", help="the patch that takes edits no other claims")
    _add_upstream(one)

    commands.add_parser("headers", help="check the headers and the size of every patch")
    return parser


def _add_upstream(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--upstream", type=Path, help="pristine tree (default: the pinned sdist)")


def _run(options: argparse.Namespace) -> list[str]:
    root = options.root
    if options.command == "fetch":
        directory = options.directory or root / "build" / "Megatron-LM"
        return [fetch(Lock.read(root / "patches/upstream.toml"), root, directory, options.git)]
    patchset = PatchSet(root)
    if options.command == "headers":
        return check_patches(patchset)
    if options.command == "lock":
        return relock(patchset, Pristine(patchset, options.upstream), options.check)
    checkout = Checkout(options.checkout, patchset.lock.version)
    if options.command == "export":
        return export(patchset, checkout, Pristine(patchset, options.upstream), options.into)
    if options.check:
        return operations.check(patchset, checkout)
    if options.status:
        return operations.status(patchset, checkout)
    if options.revert:
        return operations.revert(patchset, checkout)
    return operations.apply(patchset, checkout, options.link)


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        for line in _run(options):
            print(line)
        return 0
    except OverlayError as error:
        lines, code = error.lines, error.code
    except OSError as error:
        lines, code = [f"{error.filename2 or error.filename}: {error.strerror}"], FAILED
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return code
