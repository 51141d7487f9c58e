# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The command line."""

import argparse
from pathlib import Path

from overlay.checkout import Checkout
from overlay.cli import REPOSITORY, Parser, reported
from overlay.errors import USAGE, OverlayError
from overlay.git import write_files
from overlay.patchset import PatchSet
from staging.content import Content
from staging.description import graph, message, pr_text
from staging.features import Feature, Features
from staging.formatting import check_tools, format_files, unclean
from staging.repository import Repository


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
    what.add_argument("--graph", action="store_true", help="print the features for the docs")
    parser.add_argument("--branch", metavar="B", help="name of the branch, which is new")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: CHECKOUT-prs/B")
    return parser


def stage(
    features: Features, wanted: list[Feature], root: Path, branch: str, out: Path
) -> list[str]:
    """Make the branch, and write descriptions and patches into ``out``; returns lines to print.

    Raises:
        OverlayError: nothing was made.
    """
    repository = Repository(root)
    repository.check_new_branch(branch)
    if out.exists() and any(out.iterdir()):
        raise OverlayError(USAGE, f"{out} is not empty")
    features.patchset.check_against_lock()
    check_tools()
    content, lines = Content(features, Checkout(root)), []
    with repository.worktree() as tree:
        for feature in wanted:
            commit = _commit(feature, content, repository, tree)
            lines.append(f"{commit[:12]} {feature.name}: {feature.title}")
        repository.branch(branch, commit)
    patches = repository.format_patch(branch, out)
    for feature in wanted:
        write_files(out, {f"{feature.name}/PR.md": pr_text(features, feature).encode()})
    return [*lines, f"branch {branch}; {len(patches)} patches and each PR.md in {out}"]


def _commit(feature: Feature, content: Content, repository: Repository, tree: Path) -> str:
    patched, own = content.patched(feature), content.own(feature)
    left = unclean(tree, list(patched))
    write_files(tree, patched | own)
    for path in content.executables(feature):
        (tree / path).chmod(0o755)
    paths = sorted(patched | own)
    format_files(tree, paths, left)
    for path in patched:
        content.take(path, (tree / path).read_bytes())
    return repository.commit(tree, paths, message(feature))


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    features = Features(PatchSet(options.root))
    if options.graph:
        print(graph(features))
        return 0
    if not (options.checkout and options.branch):
        parser.error("CHECKOUT and --branch are needed")
    wanted = features.all()
    if options.feature:
        features.get(options.feature)
        wanted = features.stack(options.feature)
    root = options.checkout.resolve()
    out = (options.out or root.with_name(f"{root.name}-prs") / options.branch).resolve()
    print("\n".join(stage(features, wanted, root, options.branch, out)))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, else as that of apply_overlay.sh."""
    parser = _parser()
    options = parser.parse_args(argv)
    return reported(lambda: _run(parser, options))
