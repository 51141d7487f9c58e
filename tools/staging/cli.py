# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The command line of ``stage_upstream_pr.sh``."""

import argparse
import signal
import sys
from pathlib import Path

from command_line import Parser, numbers
from overlay.checkout import Checkout
from overlay.cli import REPOSITORY, reported
from overlay.errors import FAILED, USAGE, OverlayError
from overlay.git import write_files
from overlay.patchset import PatchSet
from staging import trial
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
    what.add_argument(
        "--try", nargs="*", dest="try_", metavar="NAME", help="run the tests of each, staged alone"
    )
    what.add_argument("--graph", action="store_true", help="print the features for the docs")
    parser.add_argument("--branch", metavar="B", help="name of the branch, which is new")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: CHECKOUT-prs/B")
    parser.add_argument("--worlds", type=numbers, metavar="N,…", help="of --try: numbers of ranks")
    return parser


def stage(
    features: Features, wanted: list[Feature], root: Path, branch: str, out: Path
) -> list[str]:
    """Make the branch, and write descriptions and patches into ``out``; return the lines to print.

    Raises:
        OverlayError: a feature cannot be staged; no branch is made.
    """
    repository = Repository(root)
    repository.check_new_branch(branch)
    if out.exists() and any(out.iterdir()):
        raise OverlayError(USAGE, f"{out} is not empty")
    content, lines = _content(features, root), []
    with repository.worktree() as tree:
        for feature in wanted:
            commit = _commit(feature, content, repository, tree)
            lines.append(f"{commit[:12]} {feature.name}: {feature.title}")
        repository.branch(branch, commit)
    patches = repository.format_patch(branch, out)
    for feature in wanted:
        write_files(out, {f"{feature.name}/PR.md": pr_text(features, feature).encode()})
    return [*lines, f"branch {branch}; {len(patches)} patches and each PR.md in {out}"]


def try_each(
    features: Features, wanted: list[Feature], root: Path, worlds: list[int] | None, out: Path
) -> bool:
    """Stage each feature on those it needs, and run its tests there; return whether all passed.

    Args:
        worlds: numbers of ranks; None for those that the feature's tests need.

    Raises:
        OverlayError: a feature cannot be staged.
    """
    repository = Repository(root)
    content, passed = _content(features, root), True
    out.mkdir(parents=True, exist_ok=True)
    print(trial.HEAD, flush=True)
    with repository.worktree() as pristine:
        for feature in wanted:
            content.start_again()
            with repository.worktree() as tree:
                for one in features.stack(feature.name):
                    _commit(one, content, repository, tree)
                for ranks in worlds or features.ranks_of(feature):
                    found = trial.try_feature(features, feature, ranks, pristine, tree, out)
                    print(found.row(), flush=True)
                    passed = passed and found.passed
    return passed


def _content(features: Features, root: Path) -> Content:
    features.patchset.check_against_lock()
    check_tools()
    return Content(features, Checkout(root))


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
    trying = options.try_ is not None
    if not options.checkout or trying == bool(options.branch):
        parser.error("CHECKOUT is needed, and --branch but for --try")
    root = options.checkout.resolve()
    out = options.out or root.with_name(f"{root.name}-prs") / (options.branch or "try")
    if trying:
        wanted = [features.get(name, "--try") for name in options.try_] or features.all()
        return 0 if try_each(features, wanted, root, options.worlds, out.resolve()) else FAILED
    wanted = features.all()
    if options.feature:
        features.get(options.feature)
        wanted = features.stack(options.feature)
    out = out.resolve()
    print("\n".join(stage(features, wanted, root, options.branch, out)))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 0 if done, 1 if tests failed, else as apply_overlay.sh."""
    parser = _parser()
    options = parser.parse_args(argv)
    # Ending this process must end the ranks of a trial, and leave no worktree.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return reported(lambda: _run(parser, options))
