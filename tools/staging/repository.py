# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The user's git repository, which gets a branch and is not changed otherwise."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from overlay.errors import FAILED, LOCAL_EDITS, NOT_THE_PIN, USAGE, OverlayError


class Repository:
    """A clean git checkout with an identity to sign off commits.

    Raises:
        OverlayError: the checkout is not clean, not the top of one, or has no identity.
    """

    def __init__(self, root: Path):
        self.root = root
        done = self._run(root, "rev-parse", "--show-toplevel")
        if done.returncode or Path(done.stdout.strip()).resolve() != root.resolve():
            raise OverlayError(NOT_THE_PIN, f"{root} is not the top of a git checkout")
        if changed := self.git("status", "--porcelain").splitlines():
            what = f"{changed[0][3:]} and others" if len(changed) > 1 else changed[0][3:]
            raise OverlayError(LOCAL_EDITS, f"{root} is not clean: {what}; commit or stash first")
        for who in ("AUTHOR", "COMMITTER"):
            if self._run(
                root, "-c", "user.useConfigOnly=true", "var", f"GIT_{who}_IDENT"
            ).returncode:
                raise OverlayError(
                    USAGE, "nobody to sign off: set git config user.name and user.email"
                )

    @staticmethod
    def _run(folder: Path, *args: str) -> subprocess.CompletedProcess:
        ours = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
        env = {name: value for name, value in os.environ.items() if name not in ours}
        return subprocess.run(["git", *args], cwd=folder, env=env, capture_output=True, text=True)

    def git(self, *args: str, folder: Path | None = None) -> str:
        done = self._run(folder or self.root, *args)
        if done.returncode:
            reason = done.stderr.strip().splitlines() or ["no reason given"]
            raise OverlayError(FAILED, f"git {args[0]} failed: {reason[-1]}")
        return done.stdout

    def check_new_branch(self, branch: str) -> None:
        if self._run(self.root, "check-ref-format", "--branch", branch).returncode:
            raise OverlayError(USAGE, f"{branch!r} is no name for a branch")
        if not self._run(
            self.root, "rev-parse", "-q", "--verify", f"refs/heads/{branch}"
        ).returncode:
            raise OverlayError(LOCAL_EDITS, f"there is a branch {branch} already: delete it first")

    @contextlib.contextmanager
    def worktree(self) -> Iterator[Path]:
        """Provide a worktree of HEAD in a temporary folder, which is removed after the block."""
        with tempfile.TemporaryDirectory(prefix="staging-") as folder:
            tree = Path(folder, "tree")
            self.git("worktree", "add", "--quiet", "--detach", str(tree), "HEAD")
            try:
                yield tree
            finally:
                self.git("worktree", "remove", "--force", str(tree))

    def commit(self, tree: Path, paths: list[str], message: str) -> str:
        """Commit files of a worktree, signed off; return the commit."""
        self.git("add", "--force", "--", *paths, folder=tree)
        # The user's hooks are meant for the user's own tree.
        self.git("commit", "--quiet", "--no-verify", "--signoff", "-m", message, folder=tree)
        return self.git("rev-parse", "HEAD", folder=tree).strip()

    def branch(self, name: str, commit: str) -> None:
        self.git("branch", "--no-track", name, commit)

    def format_patch(self, branch: str, out: Path) -> list[str]:
        """Write the branch's commits since HEAD as patch files; return their paths."""
        args = ["--quiet", "--output-directory", str(out), f"HEAD..{branch}"]
        self.git("format-patch", *args)
        return sorted(str(path) for path in out.glob("*.patch"))
