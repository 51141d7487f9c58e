# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Commits of features, in temporary worktrees of the user's git checkout, and trials of them."""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from overlay.cli import REPOSITORY
from overlay.cli import main as overlay
from overlay.errors import FAILED, LOCAL_EDITS, NOT_THE_PIN, OverlayError
from overlay.git import reason, user_git, write_files
from staging.features import TESTS, Feature, Features

FORMATTERS = {"isort": r"ERROR: (.+?) Imports are", "black": r"would reformat (.+)"}
"""Upstream's formatters, each with the pattern of its output for a file that it would change."""
LOGS = REPOSITORY / "build/staging"
"""Folder of the logs of features' tests."""
CPU_RUNTIME = "megatron/core/cpu_runtime/"
SITE = {
    "sitecustomize.py": b"import typing, typing_extensions\n"
    b"typing.override = typing_extensions.override\n"
}
"""Python reads it at its start. Upstream needs Python 3.12, for this name only."""
_COUNTS = re.compile(r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in ", re.MULTILINE)
_OUR_HEADER = b"# Copyright (c) 2026, Megatron MIMO overlay contributors."


class Staging:
    """Features on a clean git checkout of a locked version.

    The checkout gets a branch, and is not changed otherwise.

    Raises:
        OverlayError: the checkout is not that, or a formatter is missing.
        SystemExit: `apply_overlay.sh --check` refuses the checkout, and has said why.
    """

    def __init__(self, features: Features, root: Path):
        self.features, self.root = features, root
        top = user_git(root, "rev-parse", "--show-toplevel")
        if top.returncode or Path(top.stdout.strip()).resolve() != root.resolve():
            raise OverlayError(NOT_THE_PIN, f"{root} is not the top of a git checkout")
        if changed := self._git("status", "--porcelain").splitlines():
            what = changed[0][3:] + " and others" * (len(changed) > 1)
            raise OverlayError(LOCAL_EDITS, f"{root} is not clean: {what}; commit or stash first")
        with contextlib.redirect_stdout(None):
            refused = overlay(
                ["--root", str(features.patchset.root), "apply", str(root), "--check"]
            )
        if refused:
            sys.exit(refused)
        if lost := [tool for tool in FORMATTERS if importlib.util.find_spec(tool) is None]:
            what = f"{' and '.join(lost)} missing in {sys.executable}: pip install '.[staging]'"
            raise OverlayError(FAILED, what)

    def _git(self, *args: str, folder: Path | None = None) -> str:
        # git must not guess who signs off, and the user's hooks are for the user's own tree.
        settings = ("-c", "user.useConfigOnly=true", "-c", f"core.hooksPath={os.devnull}")
        done = user_git(folder or self.root, *settings, *args)
        if done.returncode:
            raise OverlayError(FAILED, f"git: {reason(done)}")
        return done.stdout.rstrip()

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

    @cached_property
    def _commits(self) -> dict[str, str]:
        """The patches as commits, upon one another; features cherry-pick theirs.

        A patch of files that the checkout lacks has none.
        """
        found = {}
        with self.worktree() as tree:
            for name in self.features.headers:
                patch = str(self.features.patchset.patch_dir / name)
                if user_git(tree, "apply", "--index", "--whitespace=nowarn", patch).returncode:
                    continue
                commit = ("-c", "commit.gpgSign=false", "commit", "--quiet", "-m", name)
                self._git(*commit, folder=tree)
                found[name] = self._git("rev-parse", "HEAD", folder=tree)
        return found

    @cached_property
    def _left(self) -> dict[str, set[str]]:
        """The patched files that each formatter would change at HEAD: upstream left them so."""
        last = [*self._commits.values()][-1]
        paths = self._git("diff", "--name-only", "HEAD", last).split()
        return {tool: _unformatted(self.root, tool, paths) for tool in FORMATTERS}

    def stage(self, wanted: list[Feature], branch: str) -> list[str]:
        """Make the branch; return the lines to print.

        Raises:
            OverlayError: a feature cannot be staged, or there is the branch; none is made then.
        """
        self._git("branch", "--no-track", branch, "HEAD")
        try:
            with self.worktree() as tree:
                commits = [self.commit(feature, tree) for feature in wanted]
            self._git("branch", "--force", "--no-track", branch, commits[-1])
        except BaseException:
            self._git("branch", "--delete", "--force", branch)
            raise
        sizes = [self._git("show", "--shortstat", "--format=", commit) for commit in commits]
        made = zip(commits, wanted, sizes, strict=True)
        return [f"{commit[:12]} {one.name}:{size}" for commit, one, size in made]

    def commit(self, feature: Feature, tree: Path) -> str:
        """Commit a feature, signed off, in a worktree with those that it needs."""
        self.pick(feature, tree)
        patched = self._git("diff", "--cached", "--name-only", folder=tree).split()
        files = self.features.files_of(feature) | self.features.tests_of(feature)
        for path, source in files.items():
            write_files(tree, {path: self._staged(source.read_bytes())})
            (tree / path).chmod(0o755 if os.access(source, os.X_OK) else 0o644)
        for tool in FORMATTERS:
            _format(
                tree, tool, [path for path in (*patched, *files) if path not in self._left[tool]]
            )
        self._git("add", "--force", "--", *patched, *files, folder=tree)
        commit = ("commit", "--quiet", "--signoff", "-m", self.features.message(feature))
        self._git(*commit, folder=tree)
        return self._git("rev-parse", "HEAD", folder=tree)

    def pick(self, feature: Feature, tree: Path) -> None:
        """Put a feature's patches into a worktree that has what it needs, and into its index.

        Raises:
            OverlayError: a patch needs another feature, or a file that the checkout lacks.
        """
        for name, _ in self.features.patches_of(feature):
            if name not in self._commits:
                what = f"{feature.name}: {name} changes what only git checkouts of the tag have"
                raise OverlayError(FAILED, what)
            try:
                self._git("cherry-pick", "--no-commit", self._commits[name], folder=tree)
            except OverlayError:
                paths = self._git("diff", "--name-only", "--diff-filter=U", folder=tree).split()
                what = f"{feature.name}: {name} does not apply to {' '.join(paths)} alone"
                raise OverlayError(FAILED, f"{what}: it needs another feature") from None

    def _staged(self, data: bytes) -> bytes:
        """Return a file of ours with upstream's header, and the new names of tests that move."""
        for paths in self.features.landing.items():
            ours, theirs = (f"{TESTS}/{path[:-3]}".replace("/", ".").encode() for path in paths)
            data = re.sub(rb"\b%s\b" % re.escape(ours), theirs, data)
        if data.startswith(_OUR_HEADER) and self.features.header:
            data = self.features.header.encode() + b"\n" + data
        return data


def _unformatted(tree: Path, tool: str, paths: list[str]) -> set[str]:
    """Return the files that a formatter would change."""
    changed = re.findall(FORMATTERS[tool], _format(tree, tool, paths, "--check"))
    return {path for path in paths if any(Path(one).match(path) for one in changed)}


def _format(tree: Path, tool: str, paths: list[str], *options: str) -> str:
    """Run a formatter, with the settings in the tree's pyproject.toml; return its output."""
    python = [path for path in paths if path.endswith(".py")]
    if not python:
        return ""
    command = [sys.executable, "-m", tool, *options, *python]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    if done.returncode and not options:
        raise OverlayError(FAILED, f"{tool} failed: {reason(done)}")
    return done.stdout + done.stderr


def try_each(staging: Staging, wanted: list[Feature]) -> bool:
    """Stage each feature on those it needs, run its tests there as its description says, and print
    a line for each number of ranks.

    Return whether none failed, and of each feature that has tests, one passed on some number of
    ranks.

    The tree has our CPU runtime beside what is staged: without a GPU, the tests run upon it.

    Raises:
        OverlayError: a feature cannot be staged.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    # The tests must not find this repository's own modules.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH"))}
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    overlay_files, all_work = staging.features.patchset.overlay.items(), True
    lent = {path: source for path, source in overlay_files if path.startswith(CPU_RUNTIME)}
    for feature in wanted:
        with staging.worktree() as tree:
            for one in staging.features.stack(feature.name):
                staging.commit(one, tree)
            write_files(tree, {path: source.read_bytes() for path, source in lent.items()} | SITE)
            commands, ran = staging.features.commands(feature), False
            for ranks, command in commands.items():
                log = LOGS / f"{feature.name}-{ranks}.log"
                with log.open("w") as output:
                    how = {"cwd": tree, "env": kept, "stdout": output, "stderr": output}
                    code = subprocess.run(["bash", "-ec", command], **how).returncode
                counts = ["no tests", *_COUNTS.findall(log.read_text(errors="replace"))][-1]
                ran = ran or " passed" in counts
                works = code == 0 and (ran or ranks != max(commands))
                says = counts if works else f"FAILED: {counts}: {log}"
                print(f"{feature.name} on {ranks} ranks: {says}", flush=True)
                all_work = all_work and works
            if not commands:
                print(f"{feature.name}: no tests", flush=True)
    return all_work
