# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""EnergonSource: what is read of each sample, how often, and blends."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from examples.mimo.nemotron_vlm.data import make_source
from examples.mimo.nemotron_vlm.energon import survey as surveys
from examples.mimo.nemotron_vlm.model.media_sizes import grids_of, tubelets_of
from examples.mimo.nemotron_vlm.model.names import IMAGES, SOUND
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    image,
    make_shard,
    source,
    survey,
    whole,
)
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
    """Blends may be nested, and take parts of data sets; each sample has its own images' sizes."""
    survey(extra)
    inner = [{"path": str(digits), "subset": {"range": ["50%", "100%"]}}, {"path": str(extra)}]
    nested = blend(tmp_path, {"blend": inner})
    outer = [{"path": str(nested), "weight": 1}, {"path": str(extra), "weight": 1}]
    tokenizer, both = digits / "tokenizer", blend(tmp_path / "outer", {"blend": outer})
    opened = source(both, tokenizer, encoder=whole(tokenizer), seq_length=64)
    assert opened.epoch_size("train") is None
    drawn = [opened.name("train", number) for number in range(400)]
    others = np.cumsum([str(extra) in name for name in drawn])
    assert np.abs(others - 0.75 * np.arange(1, 401)).max() < 2  # it is in there twice
    parts = {int(name[-6:]) for name in drawn if str(digits) in name}
    assert parts == {*range(TRAIN // 2, TRAIN)}
    for number, sizes in enumerate(opened.sizes("train", 0, 20, IMAGES)):
        shapes = [each.shape[:-1] for each in opened.inputs("train", number, IMAGES)]
        assert shapes == [*map(tuple, grids_of(sizes))]

    repeated = [{"path": str(digits), "repetitions": 1}, {"path": str(extra), "repetitions": 3}]
    opened = source(blend(tmp_path, {"blend_epochized": repeated}), tokenizer)
    assert opened.epoch_size("train") == TRAIN + 3 * OTHERS


def test_captions_are_read_through_a_field_map(digits, tmp_path):
    kind = {"__module__": "megatron.energon", "__class__": "CaptioningSample"}
    fields = {"image": "png,jpg", "caption": "json[text]"}
    captions = [json.dumps({"text": f"{n} {n}", "short": f"{n}"}).encode() for n in range(3)]
    samples = [{"jpg": image(16, 16, "JPEG"), "json": caption} for caption in captions]
    make_shard(tmp_path, samples, {"sample_type": kind, "field_map": fields})
    short = {"sample_type": kind, "field_map": fields | {"caption": "json[short]"}}
    (tmp_path / ".nv-meta" / "short.yaml").write_text(yaml.dump(short))
    survey(tmp_path, digits / "tokenizer", splits=["train"])
    opened = source(tmp_path, digits / "tokenizer")
    texts = [opened.text("train", number) for number in range(3)]
    answers = [text.labels[text.loss_mask == 1].tolist() for text in texts]
    assert sorted(answers) == [[10 + n, 10 + n, 2] for n in range(3)]
    assert opened.inputs("train", 0, IMAGES).shape == (1, 3, 16, 16)
    with pytest.raises(ValueError, match="has no samples for val or test"):
        opened.costs("test", 0, 1)

    nested = blend(tmp_path / "in", {"path": str(tmp_path), "dataset_config": "short.yaml"})
    outer = blend(tmp_path / "out", {"path": str(nested)})
    survey(outer, digits / "tokenizer", splits=["train"])
    tokens = [len(text.input_ids) for text in texts]
    costs = source(outer, digits / "tokenizer").costs("train", 0, 3)
    assert costs[:, 0].tolist() == [each - 1 for each in tokens]
