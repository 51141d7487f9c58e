# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A miniature upstream in two versions, and a patch set: few files to test the tools on."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
NEXT = os.environ.get("NEXT")
"""Git directory of upstream that has the next version, if one is at hand."""
sys.path.insert(0, str(REPOSITORY / "tools"))

from overlay.checkout import sha256  # noqa: E402
from overlay.cli import main  # noqa: E402

PIN, SECOND, LATER = "1.2.3", "1.2.4", "1.3.0"
HEADER = "Description: a test\nFeature: testing\nUpstream-Status: pending\nDrop-When: never\n\n"
STATE = ".mimo-overlay"


def numbered(stem: str, changes: dict[int, str] | None = None) -> str:
    """Twelve lines of text, some of them changed."""
    lines = {number: f"{stem}_{number}" for number in range(1, 13)} | (changes or {})
    return "".join(f"{line}\n" for line in lines.values())


def package_info(version: str) -> str:
    return "MAJOR = {}\nMINOR = {}\nPATCH = {}\nPRE_RELEASE = ''\n".format(*version.split("."))


UPSTREAM = {
    "megatron/core/package_info.py": package_info(PIN),
    "megatron/core/a.py": numbered("a"),
    "megatron/core/sub/b.py": numbered("b"),
    "megatron/core/replaced.py": numbered("old"),
    "README.md": "upstream\n",
}
# The second version moves the lines of a.py; a later one, not in the lock, has changed more.
SECOND_UPSTREAM = UPSTREAM | {
    "megatron/core/package_info.py": package_info(SECOND),
    "megatron/core/a.py": "a_0\n" + numbered("a"),
}
LATER_UPSTREAM = UPSTREAM | {
    "megatron/core/package_info.py": package_info(LATER),
    "megatron/core/a.py": "a_0\n" + numbered("a", {10: "a_ten"}),
    "megatron/core/sub/b.py": numbered("b", {3: "B_three", 12: "b_twelve"}),
}
OVERLAY = {
    "megatron_overlay/megatron/core/replaced.py": "ours_instead\n",
    "megatron_overlay/megatron/core/new/deep/module.py": "new_module\n",
    "examples/mimo/run.py": "run\n",
}


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def edit(path: str, old: str, new: str) -> str:
    """A patch of one hunk that changes line 3 of a numbered file."""
    stem = old.partition("_")[0]
    body = f" {stem}_2\n-{old}\n+{new}\n {stem}_4\n"
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -2,3 +2,3 @@\n{body}"


@dataclass
class Result:
    code: int
    out: list[str]
    errors: list[str]


def run(*args: object, program: Callable[[list[str]], int] = main) -> Result:
    """Run a tool in this process, by default that of the overlay."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = program([str(arg) for arg in args])
        except SystemExit as stop:
            code = stop.code
    return Result(code, out.getvalue().splitlines(), errors.getvalue().splitlines())


def snapshot(root: Path, private: bool = True) -> dict[str, tuple]:
    """Every path below ``root`` with its kind, mode and content, by name."""
    found = {}
    for path in sorted(root.rglob("*")):
        if private or STATE not in path.parts:
            content = path.is_file() and path.read_bytes()
            content = os.readlink(path) if path.is_symlink() else content
            found[path.relative_to(root).as_posix()] = (path.lstat().st_mode, content)
    return found


class World:
    """A patch set (``root``) with both sdists in its cache, and a checkout of the pin; made below
    ``base`` unless they are there."""

    def __init__(self, base: Path):
        self.base, self.root, self.checkout = base, base / "ours", base / "checkout"
        if not self.root.exists():
            self._make()

    def _make(self) -> None:
        write_tree(self.root, OVERLAY | {"patches/upstream.toml": f'pin = "{PIN}"\n'})
        (self.root / "examples/mimo/run.py").chmod(0o755)
        write_tree(self.checkout, UPSTREAM)
        self.add_version(PIN, UPSTREAM)
        self.add_version(SECOND, SECOND_UPSTREAM)
        first = edit("megatron/core/a.py", "a_3", "A_three")
        self.patch("0001-first", first + edit("megatron/core/sub/b.py", "b_3", "B_three"))
        header = first.partition("@@")[0]
        hunk = "@@ -9,3 +9,4 @@\n a_9\n a_10\n+A_ten_and_a_half\n a_11\n"
        self.patch("0002-second", header + hunk)
        self.lock()

    def edit_lock(self, change: Callable[[str], str]) -> None:
        path = self.root / "patches/upstream.toml"
        path.write_text(change(path.read_text()))

    def add_version(self, version: str, files: dict[str, str], prefix: str = "mini/") -> None:
        """Put an sdist into the cache, as if downloaded before, and its version into the lock."""
        sdist = self.root / f"build/cache/mini-{version}.tar.gz"
        sdist.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(sdist, "w:gz", compresslevel=1) as archive:
            for path, text in files.items():
                member = tarfile.TarInfo(prefix + path)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        section = f'\n[versions."{version}"]\ntag = "v{version}"\nsdist = "mini=={version}"\n'
        section += f'sdist_sha256 = "{sha256(sdist.read_bytes())}"\n'
        self.edit_lock(lambda text: re.sub(r"(?=\n\[patches\]|\Z)", section, text, count=1))

    def drop_version(self, version: str) -> None:
        section = rf'\n\[versions."{version}"\]\n(\w+ = .*\n)+'
        self.edit_lock(lambda text: re.sub(section, "", text))

    def patch(self, name: str, diff: str, header: str = HEADER) -> Path:
        path = self.root / "patches" / f"{name}.patch"
        path.write_text(header + diff)
        return path

    def patch_text(self, name: str) -> str:
        return (self.root / "patches" / f"{name}.patch").read_text()

    def run(self, command: str, *args: object) -> Result:
        return run("--root", self.root, command, *args)

    def lock(self) -> Result:
        result = self.run("refresh")
        assert result.code == 0, result.errors
        return result

    def apply(self, *flags: str) -> Result:
        return self.run("apply", self.checkout, *flags)

    def files(self) -> dict[str, tuple]:
        """The checkout without the tool's private folder."""
        return snapshot(self.checkout, private=False)

    def text(self, path: str) -> str:
        return (self.checkout / path).read_text()

    def replace(self, path: str, old: str, new: str) -> None:
        assert old in self.text(path)
        (self.checkout / path).write_text(self.text(path).replace(old, new))

    def edit_patch_set(self) -> None:
        """A later state of the patch set: patches and overlay files come, change and go."""
        (self.root / "patches/0002-second.patch").unlink()
        diff = edit("megatron/core/sub/b.py", "b_3", "B3").replace("-b_3", "-B_three")
        self.patch("0003-third", diff)
        core = self.root / "megatron_overlay/megatron/core"
        (core / "new/deep/module.py").unlink()
        write_tree(core, {"replaced.py": "ours, later\n", "other/module.py": "other_module\n"})
        self.lock()

    def as_git(self, files: dict[str, str]) -> None:
        """Make the checkout a git tree with these files."""
        shutil.rmtree(self.checkout)
        make_repository(self.checkout, files)


def make_repository(path: Path, files: dict[str, str]) -> None:
    write_tree(path, files)
    git(path, "init", "-q", "-b", "main")
    git(path, "config", "user.name", "A. Contributor")
    git(path, "config", "user.email", "a@example.org")
    git(path, "add", "-A")
    git(path, "commit", "-qm", "upstream")


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
