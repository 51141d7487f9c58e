# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""EnergonSource: the survey, every sample once, and blends."""

import io
import json
import pickle
import re
import shlex
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data import make_source
from examples.mimo.nemotron_vlm.data.patch_grids import PatchGrids, grids_of
from examples.mimo.nemotron_vlm.data.rows import Packing, Rows
from examples.mimo.nemotron_vlm.data.sample import IMAGES, SampleSource
from examples.mimo.nemotron_vlm.energon.__main__ import main
from examples.mimo.nemotron_vlm.energon.advice import advise
from examples.mimo.nemotron_vlm.energon.encoding import File
from examples.mimo.nemotron_vlm.energon.errors import BadImage
from examples.mimo.nemotron_vlm.energon.images import Resizing
from examples.mimo.nemotron_vlm.energon.store import open_split
from examples.mimo.nemotron_vlm.energon.survey import MEDIA, Survey
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    ENCODERS,
    GRIDS,
    TOKENS_PER_TILE,
    damage_image,
    image,
    make_shard,
    source,
    survey,
    whole,
)
from tests.unit_tests.examples.nemotron_vlm.runs import options_of

TRAIN = 84


def blend(folder: Path, body: dict) -> Path:
    path = folder / "blend.yaml"
    loader = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    path.write_text(json.dumps(loader | {"splits": {"train": body, "val": body}}))
    return path


class TestStore:
    def test_reads_the_bytes_of_the_tar_files(self, digits):
        dataset = open_split(digits, "train").datasets[0]
        files = {}
        for shard in sorted(digits.glob("train-*.tar")):
            with tarfile.open(shard) as tar:
                files |= {m.name: tar.extractfile(m).read() for m in tar}
        found = {}
        for index in np.random.default_rng(0).permutation(dataset.ends[-1]).tolist():
            raw = dataset.raw(index)
            assert dataset.name(index) == f"{raw['__shard__']}/{raw['__key__']}"
            parts = {name: raw[name] for name in raw if not name.startswith("__")}
            found |= {f"{raw['__key__']}.{name}": content for name, content in parts.items()}
        assert found == files

    def test_refuses_what_is_not_prepared_and_other_kinds_of_samples(self, copied, tmp_path):
        (tmp_path / "empty").mkdir()
        refusals = [("none", "no such data set"), ("empty", "no shards"), (".", "run: energon pre")]
        for path, text in refusals:
            with pytest.raises(ValueError, match=text) as refusal:
                source(tmp_path / path, copied / "tokenizer")
            assert "\n" not in str(refusal.value)
        kind = {"__module__": "megatron.energon", "__class__": "TextSample"}
        config = {"sample_type": kind, "field_map": {"text": "json"}}
        (copied / ".nv-meta" / "dataset.yaml").write_text(yaml.dump(config))
        with pytest.raises(ValueError, match="TextSample; CaptioningSample and Crude"):
            source(copied)


class TestSurvey:
    @pytest.mark.parametrize("kind", ENCODERS)
    def test_is_what_the_samples_are(self, digits, kind):
        opened, seen = source(digits, encoder=ENCODERS[kind](digits / "tokenizer")), set()
        for split, count in (("train", TRAIN), ("test", 12)):
            costs, sizes = opened.costs(split, 0, count), opened.sizes(split, 0, count, IMAGES)
            assert costs.shape == (count, 2) and costs.dtype == np.int64
            assert costs[:, 1].min() == 0  # a text alone
            for number, own in enumerate(sizes):
                text, images = opened.text(split, number), opened.inputs(split, number, IMAGES)
                assert costs[number].tolist() == [len(text.input_ids), len(images)]
                if kind == "tiles":
                    rows = len(own) * TOKENS_PER_TILE
                    assert images.dtype == torch.uint8 and images.shape[1:] == (3, 16, 16)
                else:
                    rows = GRIDS.rows(own).sum()
                    assert [image.shape[:2] for image in images] == [*map(tuple, grids_of(own))]
                assert (text.input_ids == opened.token_ids[IMAGES]).sum() == rows
                assert text.input_ids.max() < opened.vocab_size <= 64
                assert text.loss_mask.sum() >= 2 and text.loss_mask.dtype == torch.float32
                assert len(opened.pictures(split, number)) == len(images) == len(own)
                seen.update(own.tolist())
        assert len(seen) > 8 or kind == "tiles"

    def test_of_any_size_has_the_pixels_of_the_image(self, digits, tmp_path):
        noise = np.random.default_rng(0).integers(256, size=(20, 33, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "PNG")
        (found,) = whole(digits / "tokenizer").read([File(IMAGES, (file.getvalue(),))])
        assert found.made.equal(GRIDS.cut(torch.from_numpy(noise).permute(2, 0, 1)))
        with pytest.raises(BadImage, match="image 1: 4 × 200000 pixels are too long a strip"):
            whole(digits / "tokenizer", max_patches=10**6).read([File(IMAGES, (image(4, 200000),))])

    @pytest.mark.parametrize(
        "more",
        [
            "--max-tiles 3 --disable-thumbnail",
            "--dynamic-resolution",
            "--dynamic-resolution --dynamic-resolution-max-patches 64 --surveys {}",
            "--dynamic-resolution --dynamic-resolution-min-patches 8",
        ],
    )
    def test_that_is_missing_is_refused_with_the_command_that_makes_it(
        self, digits, copied, tmp_path, more
    ):
        line = ["--data", f"energon:{copied}", "--tokenizer-model", str(copied / "tokenizer")]
        line += more.format(tmp_path / "surveys").split()

        def opened(prompt: str) -> SampleSource:
            options = options_of(*line, "--prompt", prompt)
            return make_source(options.args, options.preset)

        with pytest.raises(UserError, match="^[^\n]*no survey of train[^\n]*$") as refusal:
            opened("What is it?")
        command = shlex.split(str(refusal.value).partition("make one: ")[2])
        assert command[:2] == ["python", "-m"] and main(command[3:]) == 0
        assert opened("What is it?").fingerprint != source(digits).fingerprint
        with pytest.raises(UserError, match="no survey of train"):
            opened("Why?")

    def test_of_tiles_or_of_other_bounds_is_not_of_any_size(self, digits, copied, surveyed):
        surveyed()
        tokenizer = copied / "tokenizer"
        assert source(copied).fingerprint == source(digits).fingerprint
        with pytest.raises(ValueError, match="and resizing"):
            source(copied, encoder=whole(tokenizer))
        for bounds in ({"min_patches": 8}, {"max_patches": 64}):
            with pytest.raises(ValueError, match="and resizing") as refusal:
                source(digits, encoder=whole(tokenizer, **bounds))
            assert "\n" not in str(refusal.value)
        both = [source(digits, encoder=make(tokenizer)).fingerprint for make in ENCODERS.values()]
        assert both[0] != both[1]

    def test_fingerprint_is_of_the_content_and_the_order(self, digits, copied, extra):
        survey(copied)
        survey(extra)
        fingerprint = source(digits).fingerprint
        longest = int(source(digits).costs("train", 0, TRAIN)[:, 0].max())
        assert source(copied).fingerprint == fingerprint
        assert source(digits, seq_length=longest).fingerprint == fingerprint
        assert source(digits, seq_length=longest - 1).fingerprint != fingerprint
        assert source(digits, seed=6).fingerprint != fingerprint
        assert source(extra).fingerprint != fingerprint

    def test_fingerprint_is_of_the_way_in_which_texts_are_read(self, digits, copied, monkeypatch):
        from examples.mimo.nemotron_vlm.energon import survey as surveys

        before = source(digits).fingerprint
        monkeypatch.setattr(surveys, "FORMAT", surveys.FORMAT + 1)
        survey(copied)
        assert source(copied).fingerprint != before

    def test_names_a_shard_that_is_missing_before_a_sample_is_read(self, copied):
        survey(copied)
        (copied / "train-0001.tar").unlink()
        missing = "1 shards are missing: train-0001.tar; .* survey with --again"
        with pytest.raises(ValueError, match=missing):
            source(copied)

    def test_is_the_same_from_several_processes(self, digits, copied, tmp_path):
        survey(copied, splits=["train"], workers=2, folder=tmp_path / "surveys")
        opened, alone = source(copied, surveys=tmp_path / "surveys"), source(digits)
        assert opened.fingerprint == alone.fingerprint
        assert np.array_equal(opened.costs("train", 0, 500), alone.costs("train", 0, 500))

    def test_is_printed_with_what_is_bad(self, copied, surveyed):
        damaged = damage_image(copied, "train-0001.tar")
        printed = surveyed("--seq-length", "26", "--names", "1")
        assert f"{copied} train: 84 samples in 4 shards, 83 good" in printed
        assert f"  bad image: 1\n    {damaged}: image 1: " in printed
        long = r"  too long: (\d+), of which --long-samples cut keeps \1\n    train-\S+: "
        assert re.search(rf"{long}\d+ tokens, 26 fit\n/", printed)
        assert f"{copied} val: 12 samples in 1 shards, 12 good" in printed

    @pytest.mark.parametrize("large, share", [((48, 32), 1), ((120, 120), 0.75)])
    def test_says_how_many_images_its_own_bound_has_shrunk(self, large, share):
        """The bound is 96 patches of 4 pixels, the size of 48 × 32."""
        pixels = Resizing(PatchGrids(4, 2, 4, 96))
        shapes = [(24, 20), (40, 24), (48, 32), large]
        media, one = np.zeros(4, MEDIA), np.ones(4, np.int32)
        media["size"] = [pixels.size_of(*shape) for shape in shapes]
        media["own"] = [pixels.own_patches(*shape) for shape in shapes]
        tokens = pixels.rows(media["size"]).astype(np.int32) + 3
        found = Survey(0 * one, tokens, one, one.cumsum(), one, one, one, media, [], "")
        encoder = SimpleNamespace(images=pixels, tokens_per_tile=1)
        printed = "\n".join(advise(found, encoder, np.arange(4), Packing()))
        assert re.search(rf"  96 +{share:.1%}", printed)
        assert "-max-patches 96, which 99% of samples fit" in printed
        assert printed.endswith(f"with which {share:.0%} of images keep their size")

    def test_recommends_a_length_and_tiles_and_says_what_others_leave_out(
        self, digits, surveyed, tmp_path
    ):
        """No sample has more than 27 tokens."""
        printed, opened = surveyed(), source(digits)
        tokens = opened.costs("train", 0, TRAIN)[:, 0]
        short = tokens[tokens <= 16]
        shares = len(short) / TRAIN, short.sum() / tokens.sum(), 1 - short.mean() / 16
        assert re.search("  16 +" + " +".join(f"{share:.1%}" for share in shares), printed)
        rows = len(Rows(opened, "train", 64, Packing(TRAIN, 16)).first())
        packed = 1 - tokens.sum() / rows / 64
        assert re.search(rf"  64 .* {packed:.1%}\n  --max-tiles", printed)
        assert "recommended: --seq-length 32 --max-tiles 3, " in printed
        most = re.search(r"\n  2 .*%  +(\d+) tokens", printed)[1]
        config = tmp_path / "run.yaml"
        config.write_text("max-tiles: 2\ntrain-iters: 10\n")
        assert f"99 %: {most} " in surveyed("--config", str(config))


def test_blends_keep_proportions_or_have_an_epoch(digits, extra, tmp_path):
    """Blends may be nested, and take parts of data sets."""
    survey(extra)
    inner = [{"path": str(digits), "subset": {"range": ["0%", "50%"]}}, {"path": str(extra)}]
    nested = blend(tmp_path, {"blend": inner})
    (tmp_path / "outer").mkdir()
    outer = [{"path": str(nested), "weight": 1}, {"path": str(extra), "weight": 1}]
    opened = source(blend(tmp_path / "outer", {"blend": outer}), digits / "tokenizer")
    assert opened.epoch_size("train") is None
    drawn = [opened.name("train", number) for number in range(400)]
    others = np.cumsum([str(extra) in name for name in drawn])
    assert np.abs(others - 0.75 * np.arange(1, 401)).max() < 2  # it is in there twice
    assert len({name for name in drawn if str(digits) in name}) == TRAIN // 2
    wanted = [opened.text("train", n).input_ids.numel() for n in range(20)]
    assert opened.costs("train", 0, 20)[:, 0].tolist() == wanted

    repeated = [
        {"path": str(digits), "repetitions": 1},
        {"path": str(extra), "repetitions": 3},
    ]
    opened = source(blend(tmp_path, {"blend_epochized": repeated}), digits / "tokenizer")
    assert opened.epoch_size("train") == TRAIN + 3 * 21
    drawn = [opened.name("train", number) for number in range(TRAIN + 3 * 21)]
    assert {drawn.count(name) for name in drawn if str(extra) in name} == {3}
    assert len(set(drawn)) == TRAIN + 21


def test_captions_are_read_through_a_field_map(digits, tmp_path):
    kind = {"__module__": "megatron.energon", "__class__": "CaptioningSample"}
    fields = {"image": "png,jpg", "caption": "json[text]"}
    captions = [json.dumps({"text": f"{number} {number}"}).encode() for number in range(3)]
    samples = [{"jpg": image(16, 16, "JPEG"), "json": caption} for caption in captions]
    make_shard(tmp_path, samples, {"sample_type": kind, "field_map": fields})
    survey(tmp_path, digits / "tokenizer", splits=["train"])
    opened = source(tmp_path, digits / "tokenizer")
    answers = []
    for number in range(3):
        text = opened.text("train", number)
        answers.append(text.labels[text.loss_mask == 1].tolist())
        assert opened.inputs("train", number, IMAGES).shape == (1, 3, 16, 16)
    assert sorted(answers) == [[10 + n, 10 + n, 2] for n in range(3)]
    with pytest.raises(ValueError, match="has no samples for val or test"):
        opened.costs("test", 0, 1)


def test_a_pickle_reads_the_same(digits):
    """Loading processes that are forked are in rows.py."""
    opened = source(digits)
    opened.inputs("train", 0, IMAGES)  # files are open when it is pickled
    again = pickle.loads(pickle.dumps(opened))
    assert again.fingerprint == opened.fingerprint
    for number in range(TRAIN):
        assert torch.equal(
            again.inputs("train", number, IMAGES), opened.inputs("train", number, IMAGES)
        )
