# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The survey of each shard is kept as it ends, and taken as long as nothing of it changes."""

import json
import os
from pathlib import Path

import pytest

from examples.mimo.nemotron_vlm.energon import files
from examples.mimo.nemotron_vlm.energon.store import DataSet
from megatron.energon import BaseWebdatasetFactory
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    damage_image,
    encoder,
    image,
    source,
    survey,
)

ONE = {"splits": ["train"], "makes": [encoder]}
TURNS = [{"from": "human", "value": "look <image>"}, {"from": "gpt", "value": "7"}]


def shards_of(reads) -> list[str]:
    """Return the shards that were read since the last call, in their order."""
    shards = list(dict.fromkeys(name.partition("/")[0] for name in reads.samples))
    reads.samples.clear()
    return shards


def forget(path: Path) -> None:
    """Remove the surveys of whole data sets."""
    for file in (path / ".nv-meta").glob("survey-*"):
        file.unlink()


def prepare(path: Path, shards: list[str]) -> None:
    parts = [("train", "train-.*"), ("val", "val-.*")]
    BaseWebdatasetFactory.prepare_dataset(path, shards, split_parts_patterns=parts, workers=1)


def test_one_that_is_killed_before_shards_are_added_goes_on_with_the_others(
    copied, tmp_path, monkeypatch, reads
):
    """Its files equal the files of a survey that several processes make of all shards."""
    shards = sorted(file.name for file in copied.glob("*.tar"))
    prepare(copied, [shards[1], shards[3], shards[4]])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        name = DataSet.name

        def killed(dataset: DataSet, index: int) -> str:
            if (found := name(dataset, index)).startswith(shards[3]):
                raise KeyboardInterrupt
            return found

        patch.setattr(DataSet, "name", killed)
        survey(copied, **ONE)
    assert not [*copied.glob(".nv-meta/survey-*")]
    prepare(copied, shards)
    reads.samples.clear()
    survey(copied, **ONE)
    assert shards_of(reads) == [shards[0], shards[2], shards[3]]
    survey(copied, folder=tmp_path / "other", workers=2, **ONE)
    files = [*(tmp_path / "other").glob("survey-*")]
    assert len(files) == 3
    for file in files:
        assert file.read_bytes() == (copied / ".nv-meta" / file.name).read_bytes()


def test_what_was_missing_is_damaged_or_has_been_replaced_is_read_again(copied, reads):
    """A shard that replaces another one may have its size and time."""
    missing, shard = copied / "train-0003.tar", copied / "train-0001.tar"
    missing.rename(copied / "away")
    survey(copied, **ONE)
    (copied / "away").rename(missing)
    forget(copied)
    kept = [*(copied / ".nv-meta" / "surveyed").iterdir()]
    assert len(kept) == 3
    first = min(kept, key=lambda file: file.stat().st_mtime_ns)
    first.write_bytes(first.read_bytes()[:-30])
    before = shard.stat()
    damage_image(copied, shard.name)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = shard.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    reads.samples.clear()
    survey(copied, **ONE)
    assert shards_of(reads) == ["train-0000.tar", shard.name, missing.name]
    assert source(copied).left_out("train") == {"bad image": 1}
    survey(copied, **ONE, again=True)
    assert len(shards_of(reads)) == 4


def test_of_records_only_runs_that_changed_are_read(digits, tmp_path, monkeypatch, reads):
    monkeypatch.setattr(files, "CHUNK", 10)
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(image(16, 16))
    records = [{"image": f"{n // 10}.png", "conversations": TURNS} for n in range(35)]

    def surveyed(count: int) -> list[str]:
        reads.samples.clear()
        (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records[:count])))
        survey(tmp_path, digits / "tokenizer", **ONE)
        return [name.partition(":")[2] for name in reads.samples]

    assert len(surveyed(25)) == 25
    assert surveyed(35) == [str(line) for line in range(21, 36)]
    forget(tmp_path)
    (tmp_path / "1.png").write_bytes(image(16, 32))
    (tmp_path / "3.png").unlink()
    assert surveyed(35) == [str(line) for line in (*range(11, 21), *range(31, 36))]
    assert source(tmp_path, digits / "tokenizer").left_out("train") == {"bad text": 5}
