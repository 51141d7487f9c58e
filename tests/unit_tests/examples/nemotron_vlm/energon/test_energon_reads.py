# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Reads of shards: each image once on each rank that encodes it, and reads that fail."""

import io
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
import yaml
from PIL import Image

from examples.mimo.common.layout import COLOCATED, NON_COLOCATED, Batch, Layout, Layouts
from examples.mimo.nemotron_vlm.data.rows import Packing, Rows
from examples.mimo.nemotron_vlm.data.sample import IMAGES
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule
from megatron.energon import BaseWebdatasetFactory
from tests.unit_tests.examples.nemotron_vlm.data.images_alone import one_take, reader, step_plan
from tests.unit_tests.examples.nemotron_vlm.energon.counted_files import ShardReads
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    names,
    source,
    survey,
)

SEQ_LENGTH = 64
REPLICA = Layout(tp=2, cp=2, pp=2, dp=1)
ROWS, MICROBATCHES = 8, 4
TEXT_BYTES = 4096
"""Most bytes read for a text: headers of two files, and a json of a few hundred bytes."""


def ranks_of(encoder_layout: Layout, placement: str) -> list[tuple[int | None, int | None]]:
    """Each rank's part of the encoder and DP rank of the language model."""
    parts = [part for part in range(encoder_layout.dp) for _ in range(encoder_layout.tp)]
    if placement == COLOCATED:
        return [(part, 0) for part in parts]
    return [(part, None) for part in parts] + [(None, 0)] * REPLICA.size


class TestAStepOfOneReplica:
    @pytest.mark.parametrize("packing", [None, Packing(window=28, multiple=8)])
    @pytest.mark.parametrize(
        ("encoder_layout", "placement"),
        [
            pytest.param(Layout(tp=2, dp=4), COLOCATED, id="encoder-tp-2-dp-4"),
            pytest.param(Layout(dp=8), COLOCATED, id="encoder-dp-8"),
            pytest.param(Layout(tp=2, dp=1), NON_COLOCATED, id="non-colocated"),
        ],
    )
    def test_reads_an_image_once_on_each_rank_that_encodes_it(
        self, digits, monkeypatch, encoder_layout, placement, packing
    ):
        opened = source(digits, seq_length=SEQ_LENGTH)
        rows = Rows(opened, "train", SEQ_LENGTH, packing)
        batch = Batch(ROWS, ROWS // MICROBATCHES, SEQ_LENGTH)
        layouts = Layouts((encoder_layout,), REPLICA, batch, placement)
        counts = ShardReads(digits, monkeypatch)
        wanted, texts = Counter(), 0
        for part, dp in ranks_of(encoder_layout, placement):
            schedule = EncoderSchedule(macro_batch=ROWS)
            plan = step_plan(layouts, part, dp, row_cost=sum, schedule=schedule)
            reading = reader(opened, packing, SEQ_LENGTH)
            per_microbatch = 1 if packing else ROWS // MICROBATCHES
            for take in plan.takes(rows, 0, ROWS // per_microbatch, per_microbatch):
                assert isinstance(reading[take], dict)
                encoded = {piece.sample for piece in take.shares[IMAGES].pieces or ()}
                wanted.update(names(opened, "train", encoded))
                texts += len(encoded | {number for row in take.rows for number in row})
        found = counts.of_images()
        assert found == wanted and min(found.values()) >= encoder_layout.tp
        # A rank that encodes an image reads its text beside it.
        assert 0 < counts.of_text() <= (texts + wanted.total()) * TEXT_BYTES


@pytest.fixture
def pictures(tmp_path, digits):
    """Make samples of two images whose grids differ, with a given dataset.yaml."""

    def make(config: dict):
        with webdataset.TarWriter(str(tmp_path / "a.tar")) as tar:
            for number in range(6):
                files = {"__key__": f"{number}"}
                for name, width in (("0.png", 16), ("1.png", 16 * (1 + number))):
                    image = io.BytesIO()
                    Image.new("RGB", (width, 16)).save(image, "PNG")
                    files[name] = image.getvalue()
                talk = [("human", "copy <image> 3 <image>"), ("gpt", "3")]
                talk = [{"from": who, "value": text} for who, text in talk]
                tar.write(files | {"json": json.dumps({"conversations": talk}).encode()})
        parts = [("train", "a.*"), ("val", "b.*")]
        BaseWebdatasetFactory.prepare_dataset(
            tmp_path, ["a.tar"], split_parts_patterns=parts, workers=1
        )
        (tmp_path / ".nv-meta" / "dataset.yaml").write_text(yaml.dump(config))
        (tmp_path / ".nv-meta" / "loader.py").write_text(LOADER)
        survey(tmp_path, digits / "tokenizer", splits=["train"])
        return tmp_path

    return make


CRUDE = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
CAPTIONS = {
    "sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
    "sample_loader": "loader.py:load",
    "part_filter": "loader.py:wanted",
}
LOADER = """
def wanted(name):
    return name in ("1.png", "json")

def load(files):
    width = int.from_bytes(files["1.png"][16:20], "big")
    return {"image": files["1.png"], "caption": str(width // 16)}
"""


SAMPLE = 4
PAUSES_S = [1, 2, 4, 8, 16, 32]
ALWAYS = 10**9


class TestText:
    def test_has_each_images_own_tokens_without_reading_one(self, pictures, digits, monkeypatch):
        path = pictures(CRUDE)
        opened = source(path, digits / "tokenizer", seq_length=256)
        counts = ShardReads(path, monkeypatch)
        for number in range(6):
            ids = opened.text("train", number).input_ids
            places = np.flatnonzero(ids == opened.image_token)
            runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
            tiles = int(opened.costs("train", number, 1)[0, 1])
            assert [len(run) for run in runs] == [4, 4 * (tiles - 1)]
        assert not counts.of_images()

    def test_is_read_with_the_images_where_a_sample_loader_looks_at_them(self, pictures, digits):
        opened = source(pictures(CAPTIONS), digits / "tokenizer", seq_length=64)
        answers = [opened.text("train", n).labels[-2].item() for n in range(6)]
        assert sorted(answers) == [10 + n for n in range(1, 7)]


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


@pytest.mark.parametrize("part", ["text", "tiles"])
class TestReadsThatFail:
    """Reads of a sample with an image: of its text, as all ranks do, or of its tiles."""

    def test_are_tried_again_after_growing_pauses(self, shard, part, monkeypatch, slept, caplog):
        opened = source(shard.parent)
        wanted = getattr(source(shard.parent), part)("train", SAMPLE)
        ShardReads(shard.parent, monkeypatch).failing[shard.name] = 2
        found = getattr(opened, part)("train", SAMPLE)
        assert slept == PAUSES_S[:2]
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        assert f"{shard}: [Errno 5] Input/output error; next try in 2 s" in caplog.text

    @pytest.mark.parametrize("bad_samples", ["skip", "refuse"])
    def test_for_good_name_the_shard_and_blame_no_data(
        self, shard, part, monkeypatch, slept, bad_samples
    ):
        opened = source(shard.parent, bad_samples=bad_samples)
        reads = ShardReads(shard.parent, monkeypatch)
        reads.failing[shard.name] = ALWAYS
        text = f"^{shard} cannot be read, also after 63 s: .Errno 5. Input/output error$"
        with pytest.raises(OSError, match=text):
            getattr(opened, part)("train", SAMPLE)
        assert slept == PAUSES_S
        reads.failing.clear()
        assert len(getattr(opened, part)("train", SAMPLE))

    def test_are_not_awaited_where_the_shard_has_changed(self, shard, part, slept):
        opened = source(shard.parent)
        text = f"{shard}/train-.* has changed since the survey: "
        shard.write_bytes((shard.parent / "val-0000.tar").read_bytes()[:5000])
        with pytest.raises(ValueError, match=text):
            getattr(opened, part)("train", SAMPLE)
        shard.unlink()
        with pytest.raises(ValueError, match=text):
            getattr(source(shard.parent), part)("train", SAMPLE)
        assert not slept


class TestAShardThatCannotBeRead:
    def test_gives_a_rank_no_batch_but_a_reason(self, shard, monkeypatch, slept):
        opened = source(shard.parent)
        ShardReads(shard.parent, monkeypatch).failing[shard.name] = ALWAYS
        found = reader(opened, None, SEQ_LENGTH)[one_take([[SAMPLE]], [], [0], [4])]
        assert found.startswith(f"{shard} cannot be read")

    def test_is_left_out_by_a_survey_on_every_rank(self, shard, monkeypatch, slept):
        ShardReads(shard.parent, monkeypatch).failing[shard.name] = ALWAYS
        survey(shard.parent, again=True)
        assert slept == PAUSES_S  # for its first sample, not for each of them
        assert source(shard.parent).left_out("train") == {"unreadable shard": 24}
        with pytest.raises(ValueError, match="24 bad samples in train: .*Input/output error"):
            source(shard.parent, bad_samples="refuse")
