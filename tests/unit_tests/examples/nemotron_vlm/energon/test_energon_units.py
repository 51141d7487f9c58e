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


def made(path: Path) -> dict[str, bytes]:
    """Return the files of surveys of whole data sets."""
    return {file.name: file.read_bytes() for file in path.glob("survey-*")}


def forget(path: Path) -> None:
    """Remove the surveys of whole data sets."""
    for file in (path / ".nv-meta").glob("survey-*"):
        file.unlink()


def prepare(path: Path, shards: list[str]) -> None:
    parts = [("train", "train-.*"), ("val", "val-.*")]
    BaseWebdatasetFactory.prepare_dataset(path, shards, split_parts_patterns=parts, workers=1)


def test_one_that_is_killed_goes_on_with_the_next_shard(copied, tmp_path, monkeypatch, reads):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        name = DataSet.name

        def killed(dataset: DataSet, index: int) -> str:
            if (found := name(dataset, index)).startswith("train-0002"):
                raise KeyboardInterrupt
            return found

        patch.setattr(DataSet, "name", killed)
        survey(copied, **ONE)
    reads.samples.clear()
    assert not made(copied / ".nv-meta")
    survey(copied, **ONE)
    assert shards_of(reads) == ["train-0002.tar", "train-0003.tar"]
    survey(copied, folder=tmp_path / "other", **ONE)
    assert len(shards_of(reads)) == 4
    assert made(copied / ".nv-meta") == made(tmp_path / "other")


def test_a_shard_that_is_replaced_is_read_whatever_its_size_and_time(copied, reads):
    survey(copied, **ONE)
    shard = copied / "train-0001.tar"
    before = shard.stat()
    forget(copied)
    reads.samples.clear()
    damage_image(copied, shard.name)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = shard.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    survey(copied, **ONE)
    assert shards_of(reads) == [shard.name]
    assert source(copied).left_out("train") == {"bad image": 1}


def test_what_is_missing_or_damaged_is_not_kept(copied, reads):
    (copied / "train-0003.tar").rename(copied / "away")
    survey(copied, **ONE)
    (copied / "away").rename(copied / "train-0003.tar")
    forget(copied)
    kept = sorted((copied / ".nv-meta" / "surveyed").iterdir())
    assert len(kept) == 3
    kept[0].write_bytes(kept[0].read_bytes()[:-30])
    reads.samples.clear()
    survey(copied, **ONE)
    assert len(again := shards_of(reads)) == 2 and "train-0003.tar" in again
    assert not source(copied).left_out("train")
    survey(copied, **ONE, again=True)
    assert len(shards_of(reads)) == 4


def test_of_added_shards_alone_samples_are_read(copied, tmp_path, reads):
    """Both surveys together equal the survey that several processes make of all shards."""
    shards = sorted(file.name for file in copied.glob("*.tar"))
    prepare(copied, [shards[1], shards[3], shards[4]])
    survey(copied, **ONE)
    assert shards_of(reads) == [shards[1], shards[3]]
    prepare(copied, shards)
    survey(copied, **ONE)
    assert len(reads.samples) == 24 + 24 and shards_of(reads) == [shards[0], shards[2]]
    survey(copied, folder=tmp_path / "other", workers=2, **ONE)
    whole = made(tmp_path / "other")
    assert whole.items() <= made(copied / ".nv-meta").items() and len(whole) == 3


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_of_records_only_runs_that_changed_are_read(digits, tmp_path, monkeypatch, reads, form):
    """A Parquet file is written anew to add rows, here with other row groups."""
    monkeypatch.setattr(files, "CHUNK", 10)
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(image(16, 16))
    records = [{"image": f"{n // 10}.png", "conversations": TURNS} for n in range(35)]
    file = tmp_path / f"train.{form}"

    def surveyed(count: int) -> list[str]:
        reads.samples.clear()
        if form == "jsonl":
            file.write_text("\n".join(map(json.dumps, records[:count])))
        else:
            arrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
            parquet.write_table(arrow.Table.from_pylist(records[:count]), file, count // 3)
        survey(tmp_path, digits / "tokenizer", **ONE)
        return [name.partition(":")[2] for name in reads.samples]

    assert len(surveyed(25)) == 25
    assert surveyed(35) == [str(line) for line in range(21, 36)]
    assert source(tmp_path, digits / "tokenizer").epoch_size("train") == 35
    forget(tmp_path)
    (tmp_path / "1.png").write_bytes(image(16, 32))
    assert surveyed(35) == [str(line) for line in range(11, 21)]
    forget(tmp_path)
    (tmp_path / "3.png").unlink()
    assert surveyed(35) == [str(line) for line in range(31, 36)]
    assert source(tmp_path, digits / "tokenizer").left_out("train") == {"bad text": 5}
