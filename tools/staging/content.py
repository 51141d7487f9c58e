# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Changes of each feature's commit, computed in memory."""

import re

from overlay import git, series
from overlay.checkout import Checkout, digest
from overlay.errors import DIFFERS_FROM_LOCK, FAILED, OverlayError
from overlay.lock import check_version
from staging.features import TESTS, Feature, Features

_OUR_HEADER = b"# Copyright (c) 2026, Megatron MIMO overlay contributors."


class Content:
    """The files of one feature after another, on a checkout of a locked version.

    Raises:
        OverlayError: the checkout is of another version, or a file that we change differs.
    """

    def __init__(self, features: Features, checkout: Checkout):
        self.features, lock = features, features.patchset.lock
        check_version(checkout.root, checkout.version, lock.locked)
        for path, entry in lock.files.items():
            wanted = entry.before.get(checkout.version)
            found = digest(checkout.look(path))
            if wanted and found != wanted and (found or not entry.git_only):
                version = lock.versions[checkout.version].tag
                raise OverlayError(
                    DIFFERS_FROM_LOCK, f"{path} differs from {version}: stage on the tag itself"
                )
        self._original = lambda path: checkout.read(path) if digest(checkout.look(path)) else None
        patches = features.patchset.series()
        if any(self._original(path) is None for path in lock.git_only()):
            patches = {n: p for n, p in patches.items() if n not in lock.git_only_patches()}
        self._steps = {step.name: step for step in series.build(patches, self._original)}
        self._tree: dict[str, bytes] = {}
        self._modules = [
            (_module(f"{TESTS}/{ours}"), _module(f"{TESTS}/{theirs}"))
            for ours, theirs in features.landing.items()
        ]

    def start_again(self) -> None:
        """Go back to upstream's unpatched files."""
        self._tree = {}

    def patched(self, feature: Feature) -> dict[str, bytes]:
        """Return upstream's files with the feature's patches, on top of the features before it."""
        names, paths = list(self._steps), set()
        for name in self.features.patches_of(feature):
            if name not in self._steps:
                what = f"{feature.name}: {name} changes what only git checkouts of the tag have"
                raise OverlayError(FAILED, what)
            step, index = self._steps[name], names.index(name)
            before = self._steps[names[index - 1]].tree if index else {}
            for path in step.paths:
                change = before.get(path, self._original(path)), step.tree[path]
                ours = self._tree.get(path, self._original(path))
                merged, clean = git.merge(ours, *change)
                if not clean:
                    near = [n for n in self.features.patchset.lock.files[path].by if n != name]
                    raise OverlayError(
                        FAILED,
                        f"{feature.name}: {name} does not apply to {path} alone: "
                        f"it needs the feature of one of {', '.join(near)}",
                    )
                self._tree[path] = merged
                paths.add(path)
        return {path: self._tree[path] for path in paths}

    def own(self, feature: Feature) -> dict[str, bytes]:
        """Return the feature's files and tests, with upstream's header and the tests' new names."""
        files = self.features.files_of(feature) | self.features.tests_of(feature)
        return {path: self._staged(source.read_bytes()) for path, source in files.items()}

    def executables(self, feature: Feature) -> list[str]:
        """Return the feature's files that are executable."""
        sources = self.features.patchset.overlay
        return [path for path in self.features.files_of(feature) if sources[path].executable]

    def take(self, path: str, data: bytes) -> None:
        """Continue from a patched file as it was committed, after formatting."""
        if path in self._tree:
            self._tree[path] = data

    def _staged(self, data: bytes) -> bytes:
        for ours, theirs in self._modules:
            data = re.sub(rb"\b%s\b" % re.escape(ours), theirs, data)
        if data.startswith(_OUR_HEADER) and self.features.header:
            data = self.features.header.encode() + b"\n" + data
        return data


def _module(path: str) -> bytes:
    return path.removesuffix(".py").replace("/", ".").encode()
