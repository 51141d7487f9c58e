# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Why a sample cannot be used: each error's ``kind`` is how a survey counts it."""

from collections.abc import Iterator
from contextlib import contextmanager


class BadConversation(ValueError):
    """A conversation that cannot be written as tokens, or does not fit its media."""

    kind = "bad text"


class BadMedium(ValueError):
    """An image, sound or clip that cannot be decoded."""


class BadImage(BadMedium):
    """An image that cannot be decoded."""

    kind = "bad image"


class UnreadFormat(BadMedium):
    """A medium in a format that is not read."""

    kind = "unread format"


class BadSound(BadMedium):
    """A sound that cannot be decoded."""

    kind = "bad sound"


class BadClip(BadMedium):
    """A clip of video that cannot be decoded."""

    kind = "bad video"


class BadShard(ValueError):
    """A sample that cannot be read from its shard."""

    kind = "unreadable shard"


class Unreadable(OSError):
    """A sample that the file system refuses to read, which does not mean that the data is bad."""

    kind = BadShard.kind


class Excluded(ValueError):
    """A sample that the data set's own ``split.yaml`` excludes."""

    kind = "excluded by split.yaml"


class MissingPackage(OSError):
    """A package that the data needs is not installed, which does not mean that the data is bad."""


UNUSABLE = BadConversation, BadMedium, BadShard, Unreadable, Excluded


def one_line(error: BaseException) -> str:
    """Return an error's message as one line; its type if it has none."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line.encode(errors="backslashreplace").decode()  # half a character cannot be printed


@contextmanager
def decoding(kind: type[BadMedium]) -> Iterator[None]:
    """Raise whatever a decoder raises, inside the block or the decorated function, as ``kind``.

    `BadMedium` and `MissingPackage` pass as they are.
    """
    try:
        yield
    except (BadMedium, MissingPackage):
        raise
    except Exception as error:  # decoders raise errors of all kinds for damaged files
        raise kind(f"damaged: {one_line(error)}") from error
