# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the files that energon opens: it records reads of shards, and may fail."""

import errno
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from megatron.energon.epathlib import EPath


class ShardReads:
    """Reads of the shards of a data set, recorded while the stand-in is in place.

    failing: number of reads that are still to fail, by the shard's name.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[tuple[str, range]] = []
        self.failing: dict[str, int] = {}
        self._images = {}
        for shard in folder.glob("*.tar"):
            with tarfile.open(shard) as tar:
                members = [m for m in tar if not m.name.endswith((".json", ".txt"))]
            self._images[shard.name] = {
                m.name: range(m.offset_data, m.offset_data + m.size) for m in members
            }
        opened = EPath.open

        def counted(path, mode="r", *rest, **named):
            file = opened(path, mode, *rest, **named)
            name = Path(str(path)).name
            return _File(file, name, self) if name.endswith(".tar") else file

        monkeypatch.setattr(EPath, "open", counted)

    def of_images(self) -> Counter:
        """How often each image was read as a whole, by ``shard/key``."""
        found = Counter()
        for shard, images in self._images.items():
            for name, image in images.items():
                read = sum(_common(image, part) for of, part in self.reads if of == shard)
                times, rest = divmod(read, len(image))
                assert rest == 0, f"{name} was read in part"
                found[f"{shard}/{name.partition('.')[0]}"] += times
        return +found


class _File:
    def __init__(self, file, shard: str, counts: ShardReads) -> None:
        self._file, self._shard, self._counts = file, shard, counts

    def read(self, size: int = -1) -> bytes:
        if self._counts.failing.get(self._shard, 0):
            self._counts.failing[self._shard] -= 1
            raise OSError(errno.EIO, "Input/output error")
        place = self._file.tell()
        content = self._file.read(size)
        self._counts.reads.append((self._shard, range(place, place + len(content))))
        return content

    def __getattr__(self, name: str):
        return getattr(self._file, name)


def _common(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))
