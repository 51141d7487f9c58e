# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Reads of shards: each text and image once on each rank that needs it, and reads that fail."""

import itertools
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from examples.mimo.common.steps import training_steps
from examples.mimo.nemotron_vlm.data.sample import IMAGES
from tests.unit_tests.examples.nemotron_vlm.data.images_alone import one_take, reader
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    ENCODERS,
    GRIDS,
    ShardReads,
    image,
    make_shard,
    names,
    shared_digits,
    source,
    survey,
)
from tests.unit_tests.examples.nemotron_vlm.runs import options_of, session_of
from tests.unit_tests.test_utilities import Utils, requires_world_size

SEQ_LENGTH = 64


@requires_world_size(8)
class TestEightRanks:
    """Reads of loading processes in two steps, sample by sample."""

    RUN = "--train-iters 2 --global-batch-size 28 --seq-length 64 --seed 3 --data energon:{data}"
    RUN += " --tokenizer-model {data}/tokenizer"

    @pytest.fixture(scope="class")
    def data(self):
        with shared_digits(samples=96) as made:
            yield made

    @pytest.mark.parametrize(
        "options",
        [
            "--encoder tp=2,dp=4 --language cp=2,pp=2,dp=2 --num-workers 1 --micro-batch-size 1 "
            "--pack --global-batch-size 4",
            "--encoder tp=2,dp=4 --language tp=2,dp=4 --num-workers 2 --micro-batch-size 1 "
            "--dynamic-resolution",
            "--placement non-colocated --encoder tp=4 --language cp=2,pp=2 --num-workers 2",
        ],
    )
    def test_read_a_text_once_and_an_image_once_where_it_is_encoded(
        self, options, data, shared_path, monkeypatch
    ):
        reads = ShardReads(monkeypatch, shared_path / f"reads-{Utils.rank}")
        rows, encoded = set(), set()
        line = f"{self.RUN.format(data=data)} {options}"
        with session_of(options_of(*line.split())) as session:
            loading, layouts = session.loading, session.options.layouts
            all_takes = loading._takes("train", training_steps(loading.args, loading._dp))
            takes = list(itertools.islice(all_takes, 2 * layouts.num_microbatches))
            monkeypatch.setattr(loading, "_takes", lambda *_: iter(takes))  # none is read ahead
            batches = loading.training()
            for take in takes:
                next(batches)
                rows |= {*itertools.chain(*take.rows)}
                encoded |= {one.sample for one in take.shares[IMAGES].ranges or ()}
            wanted = {
                kind: Counter(names(loading.reader.source, "train", numbers))
                for kind, numbers in (("text", rows | encoded), ("image", encoded))
            }
        everywhere = [Counter()] * Utils.world_size
        dist.all_gather_object(everywhere, Counter(encoded))
        assert {kind: reads.of_processes(kind) for kind in wanted} == wanted
        assert min(sum(everywhere, Counter()).values()) >= layouts.encoders[0].tp


SAMPLE = 4
PAUSES_S = [1, 2, 4, 8, 16, 32]
ALWAYS = 10**9


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_text_has_each_images_own_tokens_without_reading_one(digits, tmp_path, monkeypatch, kind):
    talk = [("human", "copy <image> 3 <image>"), ("gpt", "3")]
    text = {"conversations": [{"from": who, "value": value} for who, value in talk]}
    content = {"json": json.dumps(text).encode(), "0.png": image(16, 16)}
    samples = [content | {"1.png": image(16 * (1 + number), 16)} for number in range(6)]
    config = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    make_shard(tmp_path, samples, config)
    survey(tmp_path, digits / "tokenizer", splits=["train"])
    encoder = ENCODERS[kind](digits / "tokenizer")
    opened = source(tmp_path, digits / "tokenizer", encoder=encoder, seq_length=256)
    counts = ShardReads(monkeypatch)
    for number in range(6):
        ids = opened.text("train", number).input_ids
        places = np.flatnonzero(ids == opened.token_ids[IMAGES])
        runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        tokens, inputs = opened.costs("train", number, 1)[0]
        (sizes,) = opened.sizes("train", number, 1, IMAGES)
        assert len(sizes) == inputs and tokens == len(ids)
        rows = 4 * sizes if kind == "tiles" else GRIDS.rows(sizes)
        assert [len(run) for run in runs] == [4, sum(rows[1:])] and rows[0] == 4
    assert not counts.images


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    """Pauses that were asked for; none is waited for."""
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    return pauses


@pytest.fixture
def shard(digits, tmp_path):
    """The shard of a sample with an image, in a copy of the data set that no reader has open."""
    copied = shutil.copytree(digits, tmp_path / "copy")
    assert source(copied).costs("train", SAMPLE, 1)[0, 1]
    return copied / Path(source(copied).name("train", SAMPLE)).parent.name


READS = {
    "text": lambda opened: opened.text("train", SAMPLE),
    "tiles": lambda opened: opened.inputs("train", SAMPLE, IMAGES),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
class TestReadsThatFail:
    """Reads of a sample with an image: of its text, as all ranks do, or of its tiles."""

    def test_are_tried_again_after_growing_pauses(self, shard, read, monkeypatch, slept, caplog):
        opened = source(shard.parent)
        wanted = read(source(shard.parent))
        ShardReads(monkeypatch).failing[shard.name] = 2
        found = read(opened)
        assert slept == PAUSES_S[:2]
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        said = rf"{shard}, sample \d+: \[Errno 5\] Input/output error; next try in 2 s"
        assert re.search(said, caplog.text)

    def test_for_good_name_the_shard_and_blame_no_data(self, shard, read, monkeypatch, slept):
        opened = source(shard.parent)
        reads = ShardReads(monkeypatch)
        reads.failing[shard.name] = ALWAYS
        text = (
            rf"^{shard}, sample \d+ cannot be read, also after 63 s: .Errno 5. Input/output error$"
        )
        with pytest.raises(OSError, match=text):
            read(opened)
        assert slept == PAUSES_S
        reads.failing.clear()
        assert len(read(opened))

    def test_are_not_awaited_where_the_shard_has_changed(self, shard, read, slept):
        opened = source(shard.parent)
        text = f"{shard}/train-.* has changed since the survey: "
        shard.write_bytes((shard.parent / "val-0000.tar").read_bytes()[:5000])
        with pytest.raises(ValueError, match=text):
            read(opened)
        shard.unlink()
        with pytest.raises(ValueError, match=f"1 shards are missing: {shard.name}; "):
            read(source(shard.parent))
        assert not slept


def test_a_shard_that_cannot_be_read_gives_no_batch_and_is_left_out_by_a_survey(
    shard, monkeypatch, slept
):
    opened = source(shard.parent)
    ShardReads(monkeypatch).failing[shard.name] = ALWAYS
    found = reader(opened, None, SEQ_LENGTH)[one_take([[SAMPLE]], [], [0], [4])]
    assert re.match(rf"{shard}, sample \d+ cannot be read", found)
    slept.clear()
    survey(shard.parent)
    assert slept == PAUSES_S  # for its first sample, not for each of them
    assert source(shard.parent).left_out("train") == {"unreadable shard": 24}
    with pytest.raises(ValueError, match="24 bad samples in train: .*Input/output error"):
        source(shard.parent, bad_samples="refuse")
