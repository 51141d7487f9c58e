# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Why a sample cannot be used: each error's ``kind`` is how a survey counts it."""


class BadConversation(ValueError):
    """A conversation that cannot be written as tokens, or does not fit its media."""

    kind = "bad text"


class BadMedium(ValueError):
    """An image, sound or clip that cannot be decoded.

    Args:
        kind: its kind; `Encoder.read` sets it.
    """

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.kind = f"bad {kind}"


class BadShard(ValueError):
    """A sample that cannot be read from its shard."""

    kind = "unreadable shard"


class Unreadable(OSError):
    """A sample that the file system refuses to read, which does not mean that the data is bad."""


class Excluded(ValueError):
    """A sample that the data set's own ``split.yaml`` excludes."""

    kind = "excluded by split.yaml"


class MissingPackage(OSError):
    """A package that the data needs is not installed, which does not mean that the data is bad."""


UNUSABLE = BadConversation, BadMedium, BadShard, Excluded
