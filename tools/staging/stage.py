# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Commits of features, in temporary worktrees of the user's git checkout."""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from overlay import series
from overlay.checkout import Checkout
from overlay.errors import FAILED, LOCAL_EDITS, NOT_THE_PIN, USAGE, OverlayError
from overlay.git import user_git, write_files
from overlay.patchset import check_version
from staging.features import TESTS, Feature, Features

FORMATTERS = {"isort": r"ERROR: (.+?) Imports are", "black": r"would reformat (.+)"}
"""Upstream's formatters, each with the pattern of its output for a file that it would change."""
_OUR_HEADER = b"# Copyright (c) 2026, Megatron MIMO overlay contributors."


class Staging:
    """Features on a clean git checkout of a locked version, with an identity to sign off commits.

    The checkout gets a branch, and is not changed otherwise.

    Raises:
        OverlayError: the checkout is not that, a file that we change differs, or a formatter is
            missing.
    """

    def __init__(self, features: Features, root: Path):
        self.features, self.root = features, root
        top = user_git(root, "rev-parse", "--show-toplevel")
        if top.returncode or Path(top.stdout.strip()).resolve() != root.resolve():
            raise OverlayError(NOT_THE_PIN, f"{root} is not the top of a git checkout")
        if changed := self._git("status", "--porcelain").splitlines():
            what = changed[0][3:] + " and others" * (len(changed) > 1)
            raise OverlayError(LOCAL_EDITS, f"{root} is not clean: {what}; commit or stash first")
        for who in ("AUTHOR", "COMMITTER"):
            identity = ("-c", "user.useConfigOnly=true", "var", f"GIT_{who}_IDENT")
            if user_git(root, *identity).returncode:
                what = "nobody to sign off: set git config user.name and user.email"
                raise OverlayError(USAGE, what)
        if lost := [tool for tool in FORMATTERS if importlib.util.find_spec(tool) is None]:
            what = f"{' and '.join(lost)} missing in {sys.executable}: pip install '.[staging]'"
            raise OverlayError(FAILED, what)
        self._steps = patches_on(features, Checkout(root))

    def _git(self, *args: str, folder: Path | None = None) -> str:
        done = user_git(folder or self.root, *args)
        if done.returncode:
            reason = done.stderr.strip().splitlines() or ["no reason given"]
            raise OverlayError(FAILED, f"git {args[0]} failed: {reason[-1]}")
        return done.stdout

    @contextlib.contextmanager
    def worktree(self) -> Iterator[Path]:
        """Provide a worktree of HEAD in a temporary folder, which is removed after the block."""
        with tempfile.TemporaryDirectory(prefix="staging-") as folder:
            tree = Path(folder, "tree")
            self._git("worktree", "add", "--quiet", "--detach", str(tree), "HEAD")
            try:
                yield tree
            finally:
                self._git("worktree", "remove", "--force", str(tree))

    def stage(self, wanted: list[Feature], branch: str, out: Path) -> list[str]:
        """Make the branch, and write descriptions and patches into ``out``; return the lines to
        print.

        Raises:
            OverlayError: a feature cannot be staged; no branch is made.
        """
        if user_git(self.root, "check-ref-format", "--branch", branch).returncode:
            raise OverlayError(USAGE, f"{branch!r} is no name for a branch")
        ref = ("rev-parse", "-q", "--verify", f"refs/heads/{branch}")
        if not user_git(self.root, *ref).returncode:
            raise OverlayError(LOCAL_EDITS, f"there is a branch {branch} already: delete it first")
        if out.exists() and any(out.iterdir()):
            raise OverlayError(USAGE, f"{out} is not empty")
        with self.worktree() as tree:
            commits = [self.commit(feature, tree) for feature in wanted]
            self._git("branch", "--no-track", branch, commits[-1])
        self._git("format-patch", "--quiet", "--output-directory", str(out), f"HEAD..{branch}")
        for feature in wanted:
            text = self.features.pr_text(feature).encode()
            write_files(out, {f"{feature.name}/PR.md": text})
        lines = [f"{c[:12]} {f.name}: {f.title}" for c, f in zip(commits, wanted, strict=True)]
        return [*lines, f"branch {branch}; {len(commits)} patches and each PR.md in {out}"]

    def commit(self, feature: Feature, tree: Path) -> str:
        """Commit a feature, signed off, in a worktree with those that it needs."""
        patched = apply_patches(self.features, feature, self._steps, tree)
        left = _unformatted(tree, list(patched))
        files = self.features.files_of(feature) | self.features.tests_of(feature)
        for path, source in files.items():
            write_files(tree, {path: self._staged(source.read_bytes())})
            (tree / path).chmod(0o755 if os.access(source, os.X_OK) else 0o644)
        write_files(tree, patched)
        paths = sorted({*patched, *files})
        for tool in FORMATTERS:
            _format(tree, tool, [path for path in paths if path not in left[tool]])
        self._git("add", "--force", "--", *paths, folder=tree)
        # The user's hooks are meant for the user's own tree.
        commit = ("commit", "--quiet", "--no-verify", "--signoff", "-m", feature.message())
        self._git(*commit, folder=tree)
        return self._git("rev-parse", "HEAD", folder=tree).strip()

    def _staged(self, data: bytes) -> bytes:
        """Return a file of ours with upstream's header, and the new names of tests that move."""
        for paths in self.features.landing.items():
            ours, theirs = (f"{TESTS}/{path[:-3]}".replace("/", ".").encode() for path in paths)
            data = re.sub(rb"\b%s\b" % re.escape(ours), theirs, data)
        if data.startswith(_OUR_HEADER) and self.features.header:
            data = self.features.header.encode() + b"\n" + data
        return data


def patches_on(features: Features, checkout: Checkout) -> dict[str, series.Step]:
    """Return the patches on a checkout of a locked version, by name.

    Raises:
        OverlayError: the checkout is of another version, or a file that we change differs.
    """
    patchset = features.patchset
    check_version(checkout.root, checkout.version, patchset.lock.files)
    steps = patchset.steps_on(checkout.version, checkout.read)
    return {step.name: step for step in steps if not step.left_out}


def apply_patches(
    features: Features, feature: Feature, steps: dict[str, series.Step], tree: Path
) -> dict[str, bytes]:
    """Return upstream's files in ``tree``, which has what the feature needs, with its patches."""
    done: dict[str, bytes] = {}
    for name in features.patches_of(feature):
        if name not in steps:
            what = f"{feature.name}: {name} changes what only git checkouts of the tag have"
            raise OverlayError(FAILED, what)
        before = {path: done.get(path, (tree / path).read_bytes()) for path in steps[name].files}
        ((step, _, conflicts),) = series.port([steps[name]], before.get)
        if conflicts:
            by = [other.name for other in steps.values() if conflicts[0] in other.files]
            near = ", ".join(other for other in by if other != name)
            what = f"{feature.name}: {name} does not apply to {conflicts[0]} alone"
            raise OverlayError(FAILED, f"{what}: it needs the feature of one of {near}")
        done |= series.last_tree([step])
    return done


def _unformatted(tree: Path, paths: list[str]) -> dict[str, set[str]]:
    """Return the files that each formatter would change, which upstream leaves as they are."""
    found = {}
    for tool, line in FORMATTERS.items():
        changed = re.findall(line, _format(tree, tool, paths, "--check"))
        found[tool] = {path for path in paths if any(Path(one).match(path) for one in changed)}
    return found


def _format(tree: Path, tool: str, paths: list[str], *options: str) -> str:
    """Run a formatter, with the settings in the tree's pyproject.toml; return its output."""
    python = [path for path in paths if path.endswith(".py")]
    if not python:
        return ""
    command = [sys.executable, "-m", tool, *options, *python]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    if done.returncode and not options:
        reason = done.stderr.strip().splitlines() or ["no reason given"]
        raise OverlayError(FAILED, f"{tool} failed: {reason[-1]}")
    return done.stdout + done.stderr
