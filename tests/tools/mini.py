# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A miniature upstream and patch set, so that the tools are tested on trees of a few files."""

import contextlib
import io
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tools"))

from overlay.cli import main  # noqa: E402

VERSION = "1.2.3"
PACKAGE_INFO = "MAJOR = 1\nMINOR = 2\nPATCH = 3\nPRE_RELEASE = ''\n"
HEADER = "Description: a test\nFeature: testing\nUpstream-Status: pending\nDrop-When: never\n\n"
STATE = ".mimo-overlay"


def numbered(stem: str, changes: dict[int, str] | None = None) -> str:
    """Twelve lines of text, some of them changed."""
    changes = changes or {}
    return "".join(changes.get(number, f"{stem} {number}") + "\n" for number in range(1, 13))


UPSTREAM = {
    "megatron/core/package_info.py": PACKAGE_INFO,
    "megatron/core/a.py": numbered("a"),
    "megatron/core/sub/b.py": numbered("b"),
    "megatron/core/replaced.py": numbered("old"),
    "README.md": "upstream\n",
}
OVERLAY = {
    "megatron_overlay/megatron/core/replaced.py": "ours instead\n",
    "megatron_overlay/megatron/core/new/deep/module.py": "new module\n",
    "examples/mimo/run.py": "run\n",
}


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def edit(path: str, old: str, new: str) -> str:
    """A patch of one hunk that changes line 3 of a numbered file."""
    stem = old.split()[0]
    body = f" {stem} 2\n-{old}\n+{new}\n {stem} 4\n"
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -2,3 +2,3 @@\n{body}"


@dataclass
class Result:
    code: int
    out: list[str]
    errors: list[str]


def run(*args: object) -> Result:
    """Run the tool in this process."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as stop:
            code = stop.code
    return Result(code, out.getvalue().splitlines(), errors.getvalue().splitlines())


def snapshot(root: Path, private: bool = True) -> dict[str, tuple]:
    """Every path below ``root`` with its kind, mode and content, by name."""
    found = {}
    for folder, subfolders, files in os.walk(root):
        if not private and STATE in subfolders:
            subfolders.remove(STATE)
        for name in [*subfolders, *files]:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            content = None
            if stat.S_ISLNK(mode):
                content = os.readlink(path)
            elif stat.S_ISREG(mode):
                content = path.read_bytes()
            found[path.relative_to(root).as_posix()] = (mode, content)
    return found


@dataclass
class World:
    """A patch set (``root``), a pristine upstream, and a checkout of it."""

    base: Path
    root: Path = field(init=False)
    upstream: Path = field(init=False)
    checkout: Path = field(init=False)

    def __post_init__(self):
        self.root = write_tree(self.base / "ours", OVERLAY)
        (self.root / "examples/mimo/run.py").chmod(0o755)
        self.upstream = write_tree(self.base / "upstream", UPSTREAM)
        self.checkout = self.base / "checkout"
        shutil.copytree(self.upstream, self.checkout)
        patches = self.root / "patches"
        patches.mkdir()
        (patches / "upstream.toml").write_text(
            f'version = "{VERSION}"\ntag = "v{VERSION}"\ncommit = "{"0" * 40}"\n'
            f'sdist = "mini==1"\nsdist_sha256 = "{"0" * 64}"\n'
        )
        first = edit("megatron/core/a.py", "a 3", "A three")
        self.patch("0001-first", first + edit("megatron/core/sub/b.py", "b 3", "B three"))
        second = "diff --git a/megatron/core/a.py b/megatron/core/a.py\n"
        second += "--- a/megatron/core/a.py\n+++ b/megatron/core/a.py\n"
        self.patch(
            "0002-second", second + "@@ -9,3 +9,4 @@\n a 9\n a 10\n+A ten and a half\n a 11\n"
        )
        self.lock()

    def patch(self, name: str, diff: str, header: str = HEADER) -> Path:
        path = self.root / "patches" / f"{name}.patch"
        path.write_text(header + diff)
        return path

    def run(self, command: str, *args: object) -> Result:
        return run("--root", self.root, command, *args)

    def lock(self) -> Result:
        result = self.run("lock", "--upstream", self.upstream)
        assert result.code == 0, result.errors
        return result

    def apply(self, *flags: str) -> Result:
        return self.run("apply", self.checkout, *flags)

    def files(self) -> dict[str, tuple]:
        """The checkout without the tool's private folder."""
        return snapshot(self.checkout, private=False)

    def text(self, path: str) -> str:
        return (self.checkout / path).read_text()

    def edit_patch_set(self) -> None:
        """A later state of the patch set: patches and overlay files come, change and go."""
        (self.root / "patches/0002-second.patch").unlink()
        self.patch(
            "0003-third", edit("megatron/core/sub/b.py", "b 3", "B3").replace("-b 3", "-B three")
        )
        (self.root / "megatron_overlay/megatron/core/new/deep/module.py").unlink()
        write_tree(
            self.root,
            {
                "megatron_overlay/megatron/core/replaced.py": "ours, later\n",
                "megatron_overlay/megatron/core/other/module.py": "other module\n",
            },
        )
        self.lock()


def git(cwd: Path, *args: str) -> str:
    """Run git for a fixture, independent of the machine's configuration."""
    identity = {
        f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    env = os.environ | identity | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ["git", *args], cwd=cwd, env=env, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()
