# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""EnergonSource: what is read of each sample, how often, and blends."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import yaml
from PIL import Image

from examples.mimo.nemotron_vlm.data import make_source
from examples.mimo.nemotron_vlm.energon import survey as surveys
from examples.mimo.nemotron_vlm.model.media_sizes import grids_of, tubelets_of
from examples.mimo.nemotron_vlm.model.names import IMAGES, SOUND
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    CRUDE,
    image,
    make_shard,
    omni,
    source,
    survey,
    whole,
)
from tests.unit_tests.examples.nemotron_vlm.energon.media_files import mp4, sound
from tests.unit_tests.examples.nemotron_vlm.runs import options_of

TRAIN, OTHERS = 84, 21


def test_what_is_not_prepared_or_of_another_kind_is_refused(copied, tmp_path):
    (tmp_path / "empty").mkdir()
    for path, text in (("none", "no such data set"), ("empty", "no shards"), (".", "energon prep")):
        with pytest.raises(ValueError, match=text) as refusal:
            source(tmp_path / path, copied / "tokenizer")
        assert "\n" not in str(refusal.value)
    kind = {"__module__": "megatron.energon", "__class__": "TextSample"}
    config = {"sample_type": kind, "field_map": {"text": "json"}}
    (copied / ".nv-meta" / "dataset.yaml").write_text(yaml.dump(config))
    with pytest.raises(ValueError, match="TextSample; CaptioningSample and Crude"):
        source(copied)


SHARDS = "energon:{0} --tokenizer-model {0}/tokenizer"


@pytest.mark.parametrize(
    ("data", "model"),
    [
        (SHARDS, "tiny"),
        ("digits", "tiny"),
        (SHARDS, "tiny --dynamic-resolution"),
        ("digits", "tiny --dynamic-resolution"),
        ("mock", "tiny --dynamic-resolution"),
        (SHARDS, "tiny-omni --dynamic-resolution"),
        ("digits:2", "tiny-omni --dynamic-resolution"),
    ],
)
def test_costs_and_sizes_are_those_of_the_samples(digits, omni_shards, data, model, reads):
    """No file of an image or a sound is read for a text; those of a sound alone, for its input."""
    line = f"--data {data} --model {model} --seq-length 64"
    run = options_of(*line.format(omni_shards if "omni" in model else digits).split())
    opened, seen = make_source(run.args, run.preset), set()
    encoders = run.preset.encoders
    for split in ("train", "test"):
        costs = opened.costs(split, 0, TRAIN)
        sizes_of = {each: opened.sizes(split, 0, TRAIN, each.name) for each in encoders}
        for number in range(TRAIN):
            reads.media.clear()
            text, (tokens, count) = opened.text(split, number), costs[number]
            assert not reads.media
            assert tokens == len(text.input_ids) <= 64
            assert text.input_ids.max() < opened.vocab_size <= 64
            assert text.loss_mask.sum() >= 2 and text.loss_mask.dtype == torch.float32
            for each in encoders:
                sizes, found = sizes_of[each][number], opened.inputs(split, number, each.name)
                token = opened.token_ids.get(each.name, -1)  # digits have no sound
                assert (text.input_ids == token).sum() == each.rows(sizes).sum()
                if each.name == SOUND:
                    assert [len(one) for one in found] == sizes.tolist()
                    assert len(reads.media) == len(found)
                elif "resolution" in model:
                    assert [one.shape[-3:-1] for one in found] == [*map(tuple, grids_of(sizes))]
                    tubelets = [len(one) if one.ndim == 4 else 0 for one in found]
                    assert tubelets == tubelets_of(sizes).tolist()
                    seen.update(sizes.tolist())
                else:
                    assert found.dtype == torch.uint8 and found.shape == (len(sizes), 3, 16, 16)
                    seen.add(len(sizes))
                assert count == len(sizes) or each.name == SOUND or data != SHARDS
                reads.media.clear()
    assert len(seen) > (8 if "resolution" in model else 2)
    assert "omni" not in model or {0, 2} <= {*tubelets_of(np.array([*seen]))}


def test_a_fingerprint_is_of_the_content_the_order_and_how_texts_are_read(
    digits, copied, extra, monkeypatch
):
    for path in (copied, extra):
        survey(path)
    fingerprint = source(digits).fingerprint
    longest = int(source(digits).costs("train", 0, TRAIN)[:, 0].max())
    assert source(copied).fingerprint == fingerprint
    assert source(digits, seq_length=longest).fingerprint == fingerprint
    assert source(digits, seq_length=longest - 1).fingerprint != fingerprint
    assert source(digits, seed=6).fingerprint != fingerprint
    assert source(extra).fingerprint != fingerprint
    monkeypatch.setattr(surveys, "FORMAT", surveys.FORMAT + 1)
    survey(copied)
    assert source(copied).fingerprint != fingerprint


def blend(folder: Path, body: dict) -> Path:
    folder.mkdir(exist_ok=True)
    loader = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    path = folder / "blend.yaml"
    path.write_text(json.dumps(loader | {"splits": {"train": body, "val": body}}))
    return path


def test_blends_keep_proportions_or_have_an_epoch(digits, extra, tmp_path):
    """Blends may be nested, and take parts of data sets."""
    survey(extra)
    inner = [{"path": str(digits), "subset": {"range": ["0%", "50%"]}}, {"path": str(extra)}]
    nested = blend(tmp_path, {"blend": inner})
    outer = [{"path": str(nested), "weight": 1}, {"path": str(extra), "weight": 1}]
    opened = source(blend(tmp_path / "outer", {"blend": outer}), digits / "tokenizer")
    assert opened.epoch_size("train") is None
    drawn = [opened.name("train", number) for number in range(400)]
    others = np.cumsum([str(extra) in name for name in drawn])
    assert np.abs(others - 0.75 * np.arange(1, 401)).max() < 2  # it is in there twice
    assert len({name for name in drawn if str(digits) in name}) == TRAIN // 2

    repeated = [{"path": str(digits), "repetitions": 1}, {"path": str(extra), "repetitions": 3}]
    opened = source(blend(tmp_path, {"blend_epochized": repeated}), digits / "tokenizer")
    assert opened.epoch_size("train") == TRAIN + 3 * OTHERS


def test_a_sample_of_a_blend_has_the_sizes_of_its_own_images(digits, extra, tmp_path):
    """Samples of one data set of a blend may be asked for alone."""
    survey(extra)
    both = blend(tmp_path, {"blend": [{"path": str(digits)}, {"path": str(extra)}]})
    tokenizer = digits / "tokenizer"
    opened = source(both, tokenizer, encoder=whole(tokenizer))
    for number, sizes in enumerate(opened.sizes("train", 0, 20, IMAGES)):
        (alone,) = opened.sizes("train", number, 1, IMAGES)
        shapes = [each.shape[:-1] for each in opened.inputs("train", number, IMAGES)]
        assert shapes == [*map(tuple, grids_of(alone))] and alone.tolist() == sizes.tolist()


def test_captions_are_read_through_a_field_map(digits, tmp_path):
    kind = {"__module__": "megatron.energon", "__class__": "CaptioningSample"}
    fields = {"image": "png,jpg", "caption": "json[text]"}
    captions = [json.dumps({"text": f"{n} {n}", "short": f"{n}"}).encode() for n in range(3)]
    samples = [{"jpg": image(16, 16, "JPEG"), "json": caption} for caption in captions]
    make_shard(tmp_path, samples, {"sample_type": kind, "field_map": fields})
    survey(tmp_path, digits / "tokenizer", splits=["train"])
    opened = source(tmp_path, digits / "tokenizer")
    texts = [opened.text("train", number) for number in range(3)]
    answers = [text.labels[text.loss_mask == 1].tolist() for text in texts]
    assert sorted(answers) == [[10 + n, 10 + n, 2] for n in range(3)]
    assert opened.inputs("train", 0, IMAGES).shape == (1, 3, 16, 16)
    with pytest.raises(ValueError, match="has no samples for val or test"):
        opened.costs("test", 0, 1)

    short = {"sample_type": kind, "field_map": fields | {"caption": "json[short]"}}
    (tmp_path / ".nv-meta" / "short.yaml").write_text(yaml.dump(short))
    both = [{"path": str(tmp_path), "dataset_config": f"{n}.yaml"} for n in ("dataset", "short")]
    nested = blend(tmp_path / "both", {"blend_epochized": both})
    outer = blend(tmp_path / "outer", {"path": str(nested)})
    survey(outer, digits / "tokenizer", splits=["train"])
    costs = source(outer, digits / "tokenizer").costs("train", 0, 6)
    (tokens,) = {len(text.input_ids) for text in texts}
    assert sorted(costs[:, 0]) == [tokens - 1] * 3 + [tokens] * 3


def test_media_are_opened_once_and_stand_in_the_texts_order(
    omni_shards, tmp_path, monkeypatch, reads
):
    """An image between two clips, one MP4 and one of frames, and a sound."""
    frames = {f"video2.{n}.png": image(32, 24) for n in range(2)}
    files = {"video1.mp4": mp4(), **frames, "png": image(32, 24), "wav": sound(np.zeros(4000))}
    talk = ["copy <video> 3 <image> <video> <sound>", "3"]
    turns = [{"from": who, "value": said} for who, said in zip(("human", "gpt"), talk, strict=True)]
    make_shard(tmp_path, [files | {"json": json.dumps({"conversations": turns}).encode()}], CRUDE)
    tokenizer, calls = omni_shards / "tokenizer", Counter()
    survey(tmp_path, tokenizer, splits=["train"], makes=[omni])
    opened = source(tmp_path, tokenizer, encoder=omni(tokenizer), seq_length=256)
    av = pytest.importorskip("av")
    for owner, name in ((Image, "open"), (soundfile.SoundFile, "read"), (av, "open")):
        real = getattr(owner, name)

        def call(*given, real=real, name=f"{owner.__name__}.{name}", **options):
            calls[name] += 1
            return real(*given, **options)

        monkeypatch.setattr(owner, name, call)
    reads.media.clear()
    opened.text("train", 0)
    assert not reads.media and not calls
    (heard,) = opened.inputs("train", 0, SOUND)
    assert len(heard) == 4000 and calls == {"SoundFile.read": 1}
    inputs = opened.inputs("train", 0, IMAGES)
    assert [each.ndim for each in inputs] == [4, 3, 4] and [*map(len, inputs[::2])] == [3, 1]
    assert calls == {"PIL.Image.open": 3, "SoundFile.read": 1, "av.open": 1}
