# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Write the canonical patches and the lock, or check them.

Upstream's files come from the archives in ``build/cache``; git-only files from the given checkout.
What is not at hand stays as it is: patches and rows of the lock of git-only files, without a
checkout that has them, and the table of the next version, unless its commit was fetched.
"""

from overlay import git, series
from overlay.checkout import Checkout, sha256
from overlay.errors import FAILED, OverlayError, refuse
from overlay.fetch import upstream
from overlay.journal import Journal
from overlay.patchset import NEXT, PatchSet, Sides


def refresh(patchset: PatchSet, checkout: Checkout | None, only_check: bool) -> list[str]:
    """Bring patches and lock to their canonical form; return the lines to print.

    Args:
        checkout: a tree that has the git-only files, applied or not.

    Raises:
        OverlayError: the patch set is inconsistent; or, with ``only_check``, not canonical.
    """
    lock, folder, name = patchset.lock, patchset.folder, "upstream.toml"
    before = patchset.texts | {name: (folder / name).read_bytes()}
    # Main's archive has all files; its checkout has none of the releases'.
    is_of_release = checkout is not None and checkout.version != lock.next
    beside = Journal(checkout).read if is_of_release else {}.get
    lock.files = {version: _table(patchset, version, beside) for version in lock.versions}
    after = patchset.texts | {name: lock.text().encode()}
    stale = {name: text for name, text in after.items() if before.get(name) != text}
    refuse(FAILED, [f"patches/{name} is stale: run `make lock`" for name in stale] * only_check)
    git.write_files(folder, stale)
    return [f"wrote patches/{name}" for name in stale] or ["patches and lock are up to date"]


def _table(patchset: PatchSet, version: str, beside: series.Original) -> dict[str, Sides]:
    """Return a version's table, and keep the canonical texts of the patches made for it.

    Args:
        beside: returns a git-only file, or None.
    """
    lock, overlay = patchset.lock, patchset.overlay
    old, tree = lock.files.get(version, {}), upstream(lock, version, patchset.root)
    if tree is None:
        return old

    def original(path: str) -> bytes | None:
        return tree[path] if path in tree else beside(path)

    patched = series.build(patchset.series(version), original)
    refuse(FAILED, [f"on {version}: {one.problem}" for one in patched if one.problem])
    own = {lock.pin: "", lock.next: NEXT}.get(version, "no patch")
    patchset.texts |= {one.name: one.text() for one in patched if one.name.startswith(own)}
    made = series.last_tree(patched)
    twice = sorted(made.keys() & overlay)
    refuse(FAILED, [f"{path} is both an overlay file and patched" for path in twice])
    made |= {path: ours.read_bytes() for path, ours in overlay.items() if path in tree}
    table = {path: [sha256(original(path)), sha256(data)] for path, data in made.items()}
    known = lock.files.get(lock.pin, {}) | old
    for path in [path for one in patched if one.left_out for path in git.paths_of(one.diff)]:
        if path not in known:
            raise OverlayError(FAILED, f"refresh with a git checkout, which has {path}")
        table[path] = known[path]
    return dict(sorted(table.items()))
