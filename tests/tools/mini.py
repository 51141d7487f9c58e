# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A miniature upstream in two versions, and a patch set: few files to test the tools on."""

import ast
import contextlib
import io
import os
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

from overlay.__main__ import main  # noqa: E402
from overlay.checkout import sha256  # noqa: E402
from overlay.source import imported  # noqa: E402

PIN, LATER = "1.2.3", "1.3.0"
HEADER = "Description: a test\nFeature: testing\nUpstream-Status: pending\nDrop-When: never\n\n"
STATE, SCRIPT = ".mimo-overlay", "examples/run_it.py"
A, B, INFO = "megatron/core/a.py", "megatron/core/sub/b.py", "megatron/core/package_info.py"
REPLACED, MODULE = "megatron/core/replaced.py", "megatron/core/new/deep/module.py"
RUN = "examples/mimo/run.py"


def numbered(stem: str, changes: dict[int, str] | None = None) -> str:
    """Twelve lines of text, some of them changed."""
    lines = {number: f"{stem}_{number}" for number in range(1, 13)} | (changes or {})
    return "".join(f"{line}\n" for line in lines.values())


def package_info(version: str) -> str:
    return "MAJOR = {}\nMINOR = {}\nPATCH = {}\nPRE_RELEASE = ''\n".format(*version.split("."))


UPSTREAM = {
    INFO: package_info(PIN),
    A: numbered("a"),
    B: numbered("b"),
    REPLACED: numbered("old"),
    "README.md": "upstream\n",
}
CLONE = UPSTREAM | {SCRIPT: numbered("s")}
# A commit of main, which moves the lines of a.py and changes others.
LATER_UPSTREAM = CLONE | {
    INFO: package_info(LATER),
    A: "a_0\n" + numbered("a", {10: "a_ten"}),
    B: numbered("b", {3: "B_three", 12: "b_twelve"}),
}
OVERLAY = {
    f"megatron_overlay/{REPLACED}": "ours_instead\n",
    f"megatron_overlay/{MODULE}": "new_module\n",
    RUN: "run\n",
}


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def edit(path: str, old: str, new: str) -> str:
    """A patch of one hunk that changes a line of a numbered file, such as ``a_3``."""
    stem, line = old.split("_")
    before, after = int(line) - 1, int(line) + 1
    body = f" {stem}_{before}\n-{old}\n+{new}\n {stem}_{after}\n"
    names = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n"
    return f"{names}@@ -{before},3 +{before},3 @@\n{body}"


def imports(path: Path, name: str) -> set[str]:
    """The full names that a module imports, anywhere in it."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {full for node in nodes for _, full in imported(node, package)}
    return found | {each.name for n in nodes if isinstance(n, ast.Import) for each in n.names}


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
    """A patch set (``root``) with upstream's versions in its cache, and a checkout of the pin as
    git has it; made below ``base`` unless they are there."""

    def __init__(self, base: Path):
        self.base, self.root, self.checkout = base, base / "ours", base / "checkout"
        if not self.root.exists():
            self._make()

    def _make(self) -> None:
        write_tree(self.root, OVERLAY | {"patches/upstream.toml": f'pin = "{PIN}"\n'})
        (self.root / RUN).chmod(0o755)
        write_tree(self.checkout, CLONE)
        self.add_version(PIN, UPSTREAM)
        self.add_version(LATER, LATER_UPSTREAM, commit="1" * 40)
        first = edit(A, "a_3", "A_three")
        hunk = first.partition("@@")[0] + "@@ -9,3 +9,4 @@\n a_9\n a_10\n+A_ten_and_a_half\n a_11\n"
        self.patch("0001-first", first + edit(B, "b_3", "B_three"))
        self.patch("0002-second", hunk)
        self.patch("0009-script", edit(SCRIPT, "s_3", "S_three"))
        self.patch("next/0001-first", first)  # the rest is there
        self.patch("next/0002-second", hunk.replace("a_10\n", "a_ten\n"))
        result = self.run("refresh", self.checkout)
        assert result.code == 0, result.errors

    def edit_lock(self, change: Callable[[str], str]) -> None:
        path = self.root / "patches/upstream.toml"
        path.write_text(change(path.read_text()))

    def add_version(self, version: str, files: dict[str, str], top="mini/", commit="") -> None:
        """Put a version into the cache, as if fetched before, and into the lock."""
        name = f"main-{commit}.tar" if commit else f"mini-{version}.tar.gz"
        path = self.root / "build/cache" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w" if commit else "w:gz") as archive:
            for name, text in files.items():
                member = tarfile.TarInfo(top + name)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        lines = f'sdist = "mini=={version}"\nsdist_sha256 = "{sha256(path.read_bytes())}"\n'
        lines = f'commit = "{commit}"\n' if commit else lines
        self.edit_lock(lambda text: f'{text}\n[versions."{version}"]\n{lines}')

    def patch(self, name: str, diff: str, header: str = HEADER) -> Path:
        write_tree(self.root / "patches", {f"{name}.patch": header + diff})
        return self.root / f"patches/{name}.patch"

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
        self.patch("0003-third", edit(B, "b_3", "B3").replace("-b_3", "-B_three"))
        core = self.root / "megatron_overlay/megatron/core"
        (core / "new/deep/module.py").unlink()
        write_tree(core, {"replaced.py": "ours, later\n", "other/module.py": "other_module\n"})
        self.lock()

    def as_tree(self, files: dict[str, str], make: Callable = write_tree) -> None:
        """Make the checkout a tree with these files, or a git tree by ``make_repository``."""
        shutil.rmtree(self.checkout)
        make(self.checkout, files)


def make_repository(path: Path, files: dict[str, str]) -> None:
    write_tree(path, files)
    git(path, "init", "-q", "-b", "main")
    git(path, "config", "user.name", "A. Contributor")
    git(path, "config", "user.email", "a@example.org")
    git(path, "add", "-A")
    git(path, "commit", "-qm", "upstream")


def git(cwd: Path, *args: str) -> str:
    """Run git for a fixture, independent of the machine's configuration."""
    env = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", *args]
    done = subprocess.run(command, cwd=cwd, env=env, check=True, capture_output=True, text=True)
    return done.stdout.strip()
