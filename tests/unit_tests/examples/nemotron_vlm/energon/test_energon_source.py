# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""EnergonSource: what is read of each sample, how often, blends, and files of records."""

import base64
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data import make_source
from examples.mimo.nemotron_vlm.data.sample import SampleSource
from examples.mimo.nemotron_vlm.energon import files
from examples.mimo.nemotron_vlm.energon.store import open_split
from examples.mimo.nemotron_vlm.energon.survey import NoSurvey
from examples.mimo.nemotron_vlm.model.media_sizes import grids_of, tubelets_of
from examples.mimo.nemotron_vlm.model.names import IMAGES, SOUND
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    image,
    make_digits,
    make_shard,
    names,
    omni,
    source,
    survey,
    whole,
)
from tests.unit_tests.examples.nemotron_vlm.runs import options_of, trainer

TRAIN, OTHERS = 84, 21


def test_what_is_not_prepared_or_of_another_kind_is_refused(copied, tmp_path):
    (tmp_path / "empty").mkdir()
    for path, text in (("none", "no such data set"), ("empty", "no shards"), (".", "energon prep")):
        with pytest.raises(ValueError, match=f"^[^\n]*{text}[^\n]*$"):
            source(tmp_path / path, copied / "tokenizer")
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
        (SHARDS, "tiny --dynamic-resolution"),
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
            text, (tokens, count) = opened.text(split, number), costs[number]
            assert not any(media for _, media in reads)
            assert tokens == len(text.input_ids) <= 64
            assert text.input_ids.max() < opened.vocab_size <= 64
            assert text.loss_mask.sum() >= 2 and text.loss_mask.dtype == torch.float32
            for each in encoders:
                reads.clear()
                sizes, found = sizes_of[each][number], opened.inputs(split, number, each.name)
                token = opened.token_ids.get(each.name, -1)  # digits have no sound
                assert (text.input_ids == token).sum() == each.rows(sizes).sum()
                if each.name == SOUND:
                    assert [len(one) for one in found] == sizes.tolist()
                    assert sum(len(media) for _, media in reads) == len(found)
                elif "resolution" in model:
                    assert [one.shape[-3:-1] for one in found] == [*map(tuple, grids_of(sizes))]
                    tubelets = [len(one) if one.ndim == 4 else 0 for one in found]
                    assert tubelets == tubelets_of(sizes).tolist()
                    seen.update(sizes.tolist())
                else:
                    assert found.dtype == torch.uint8 and found.shape == (len(sizes), 3, 16, 16)
                    seen.add(len(sizes))
                assert count == len(sizes) or each.name == SOUND or data != SHARDS
            reads.clear()
    assert len(seen) > (8 if "resolution" in model else 2)
    assert "omni" not in model or {0, 2} <= {*tubelets_of(np.array([*seen]))}


def test_a_fingerprint_is_of_the_content_and_the_order(digits, copied, tmp_path):
    make_digits(tmp_path / "extra", samples=24, seed=2)
    for path in (copied, tmp_path / "extra"):
        survey(path)
    fingerprint = source(digits).fingerprint
    longest = int(source(digits).costs("train", 0, TRAIN)[:, 0].max())
    assert source(copied).fingerprint == fingerprint
    assert source(digits, seq_length=longest).fingerprint == fingerprint
    assert source(digits, seq_length=longest - 1).fingerprint != fingerprint
    assert source(digits, seed=6).fingerprint != fingerprint
    assert source(tmp_path / "extra").fingerprint != fingerprint


def blend(folder: Path, body: dict) -> Path:
    folder.mkdir(exist_ok=True)
    loader = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    path = folder / "blend.yaml"
    path.write_text(json.dumps(loader | {"splits": {"train": body, "val": body}}))
    return path


def test_blends_keep_proportions_or_have_an_epoch(digits, tmp_path):
    """Blends may be nested, and take parts of data sets; each sample has its own images' sizes."""
    extra = tmp_path / "extra"
    make_digits(extra, samples=24, seed=2)
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


TURNS = [{"from": "human", "value": "look <image>"}, {"from": "gpt", "value": "7"}]
KINDS = {"png": "image", "wav": "sound"}


def unpack(shards: Path, folder: Path) -> None:
    """Write what shards have as records, with clips in folders of frames beside them.

    JSONL, to train on, has paths of the other media, or base64: images as data URIs, sounds as
    objects. Parquet has media in Hugging Face's form, one with a name and one without.
    """
    arrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    records = {"train": [], "test": []}
    for split, made in records.items():
        (dataset,) = open_split(shards, split).datasets
        for raw in map(dataset.raw, dataset.subset):
            record = json.loads(raw.pop("json"))
            for each in (key for key in raw if not key.startswith("__")):
                file = folder / f"media/{raw['__key__']}.{each}".replace(".video.", "/")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(raw[each])
                text = base64.b64encode(raw[each]).decode()
                if each not in KINDS:
                    record["video"] = f"media/{file.parent.name}"
                elif split == "test":
                    path = file.name if each == "wav" else ""
                    record[KINDS[each]] = {"bytes": raw[each], "path": path}
                elif len(made) % 2:
                    record[KINDS[each]] = f"media/{file.name}"
                else:
                    uri = f"data:image/png;base64,{text}"
                    record[KINDS[each]] = uri if each == "png" else {"bytes": text}
            made.append(record)
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, records["train"])))
    columns = dict.fromkeys(key for each in records["test"] for key in each)
    table = arrow.Table.from_pylist([columns | each for each in records["test"]])
    parquet.write_table(table, folder / "val.parquet", row_group_size=7)


def test_samples_and_their_order_are_those_of_shards(omni_shards, tmp_path):
    """Training surveys the files by itself."""
    unpack(omni_shards, tmp_path)
    tokenizer = omni_shards / "tokenizer"
    of_files, of_shards = (
        source(path, tokenizer, encoder=omni(tokenizer), seq_length=64)
        for path in (tmp_path, omni_shards)
    )
    for split, count in (("train", 84), ("test", 12)):
        for number in range(count):
            texts = of_files.text(split, number), of_shards.text(split, number)
            assert all(map(torch.equal, *texts))
            for name in ("images", "sound"):
                own, wanted = (each.inputs(split, number, name) for each in (of_files, of_shards))
                assert len(own) == len(wanted) and all(map(torch.equal, own, wanted))
    for split, file in (("train", "train.jsonl"), ("test", "val.parquet")):
        assert names(of_files, split, range(1))[0].startswith(f"{tmp_path.name}/{file}:")


@pytest.fixture
def photos(tmp_path, digits) -> Path:
    """A list of 120 records in LLaVA's form, and a tokenizer."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(image(16, 16))
    records = [
        {"id": number, "image": "photos/a.png", "conversations": TURNS} for number in range(120)
    ]
    (tmp_path / "photos.json").write_text(json.dumps(records, indent=1))
    (tmp_path / "tokenizer").symlink_to(digits / "tokenizer")
    return tmp_path / "photos.json"


def source_of(path: Path, **options) -> SampleSource:
    return source(path, path.parent / "tokenizer", **options)


def command(path: Path) -> list[str]:
    return ["--data", str(path), "--tokenizer-model", str(path.parent / "tokenizer")]


def test_a_list_trains_as_it_is_and_every_fiftieth_record_is_held_out(photos, monkeypatch):
    with trainer(*command(photos), "--eval-iters", "1", "--lr", "1e-3") as run:
        assert run.train_step()["loss"] > 0
    before = source_of(photos)
    held_out = {*names(before, "test", range(3))}
    lines = [line for line, text in enumerate(photos.read_text().splitlines(), 1) if "id" in text]
    assert held_out == {f"{photos.parent.name}/photos.json:{lines[at] - 1}" for at in (0, 50, 100)}
    trained = {*names(before, "train", range(117))}
    assert len(trained) == 117 and not trained & held_out
    photos.write_text(photos.read_text().replace('"7"', '"8"'))
    assert source_of(photos).fingerprint != before.fingerprint, "a changed list is surveyed again"
    photos.write_text(photos.read_text().replace('"8"', '"9"'))
    monkeypatch.setattr("examples.mimo.nemotron_vlm.energon.source.SMALL", 116)
    with pytest.raises(NoSurvey):
        source_of(photos)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"image": "photos/b.png"}, "photos/b.png: no such file"),
        ({"image": f"photos/{'b' * 300}.png"}, "file name too long"),
        ({"image": "photos"}, "has the name of no image file"),
        ({"image": 7}, "its image is 7, no path of a file"),
        ({"image": "data:image/png;base64,a"}, "its image is no base64"),
    ],
)
def test_a_bad_record_is_named_by_its_line(photos, record, reason):
    good = json.dumps({"image": "photos/a.png", "conversations": TURNS})
    bad = json.dumps({"conversations": TURNS} | record)
    path = photos.parent / "lines.jsonl"
    path.write_text("\n".join([good] * 60 + ["", bad]))
    assert len({*names(source_of(path), "train", range(58))}) == 58
    with pytest.raises(ValueError, match=rf"lines.jsonl:62\b.*{reason}"):
        source_of(path, bad_samples="refuse")


@pytest.mark.parametrize(
    ("text", "line"), [('[\n{"a": 1},\n{"a" 2}]', 3), ('{"a": 1}', 1), ("[1, 2", 1), ("", 1)]
)
def test_a_file_that_is_no_list_is_refused(tmp_path, text, line):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=rf"a\.json:{line}: "):
        files.FileSet(tmp_path / "a.json", "train")


def test_rows_of_parquet_are_read_as_lines_are(photos, monkeypatch):
    """A row group is damaged; a row names no image, one has none."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    picture = {"bytes": image(16, 16), "path": None}
    rows = [[picture]] * 60 + [[{"bytes": None, "path": "photos/b.png"}], []]
    asked = [{"from": "human", "value": "look"}, TURNS[1]]
    table = arrow.table({"images": rows, "conversations": [TURNS] * 61 + [asked]})
    path = photos.parent / "rows.parquet"
    parquet.write_table(table, path, row_group_size=20, compression="none")
    data = bytearray(path.read_bytes())
    place = parquet.read_metadata(path).row_group(1).column(0).data_page_offset
    data[place : place + 4] = b"\xff" * 4
    path.write_bytes(data)
    found = source_of(path)
    assert found.left_out("train") == {"unreadable shard": 20, "bad text": 1}
    assert found.costs("train", 0, 40)[:, 1].tolist().count(0) == 1
    with pytest.raises(ValueError, match=r"rows\.parquet:22: "):
        source_of(path, bad_samples="refuse")
    path.write_bytes(data[:-9])
    run = options_of(*command(path))
    with pytest.raises(UserError, match=rf"^--data {path}: [^/]*footer[^/]*$"):
        make_source(run.args, run.preset)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"Parquet needs pyarrow: pip install '\.\[parquet\]'$"):
        make_source(run.args, run.preset)
