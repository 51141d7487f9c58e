# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Records in JSON, JSONL and Parquet, with media in folders or not: the samples of shards."""

import base64
import json
import sys
from pathlib import Path

import pytest
import torch

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data import make_source
from examples.mimo.nemotron_vlm.data.sample import SampleSource
from examples.mimo.nemotron_vlm.energon import files
from examples.mimo.nemotron_vlm.energon.store import open_split
from examples.mimo.nemotron_vlm.energon.survey import NoSurvey
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import image, names, omni, source
from tests.unit_tests.examples.nemotron_vlm.runs import options_of, trainer

TURNS = [{"from": "human", "value": "look <image>"}, {"from": "gpt", "value": "7"}]
KINDS = {"png": "image", "wav": "sound"}


def unpack(shards: Path, folder: Path) -> None:
    """Write what shards have as records, with clips in folders of frames beside them.

    JSONL, to train on, has paths of the other media, or base64: images as data URIs, sounds as
    objects. Parquet has them in Hugging Face's form, one with a name and one without.
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


def opened(path: Path, **options) -> SampleSource:
    return source(path, path.parent / "tokenizer", **options)


def command(path: Path) -> list[str]:
    return ["--data", str(path), "--tokenizer-model", str(path.parent / "tokenizer")]


def test_a_list_trains_as_it_is_and_every_fiftieth_record_is_held_out(photos, monkeypatch):
    with trainer(*command(photos), "--eval-iters", "1", "--lr", "1e-3") as run:
        assert run.train_step()["loss"] > 0
    before = opened(photos)
    held_out = {*names(before, "test", range(3))}
    lines = [line for line, text in enumerate(photos.read_text().splitlines(), 1) if "id" in text]
    assert held_out == {f"{photos.parent.name}/photos.json:{lines[at] - 1}" for at in (0, 50, 100)}
    trained = {*names(before, "train", range(117))}
    assert len(trained) == 117 and not trained & held_out
    photos.write_text(photos.read_text().replace('"7"', '"8"'))
    assert opened(photos).fingerprint != before.fingerprint, "a changed list is surveyed again"
    photos.write_text(photos.read_text().replace('"8"', '"9"'))
    monkeypatch.setattr("examples.mimo.nemotron_vlm.energon.source.SMALL", 116)
    with pytest.raises(NoSurvey):
        opened(photos)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"image": "photos/b.png"}, "photos/b.png: no such file"),
        ({"image": f"photos/{'b' * 300}.png"}, "file name too long"),
        ({"image": "photos"}, "has the name of no image file"),
        ({"image": 7}, "its image is 7, no path of a file"),
        ({"image": "data:image/png;base64,a"}, "its image is no base64"),
        ('["photos/a.png"]', "its json is no object"),
    ],
)
def test_a_bad_record_is_named_by_its_line(photos, record, reason):
    good = json.dumps({"image": "photos/a.png", "conversations": TURNS})
    bad = record if isinstance(record, str) else json.dumps({"conversations": TURNS} | record)
    lines = [good] * 60 + ["", bad]
    path = photos.parent / "lines.jsonl"
    path.write_text("\n".join(lines))
    assert len({*names(opened(path), "train", range(58))}) == 58
    with pytest.raises(ValueError, match=rf"lines.jsonl:62\b.*{reason}"):
        opened(path, bad_samples="refuse")


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
    found = opened(path)
    assert found.left_out("train") == {"unreadable shard": 20, "bad text": 1}
    assert found.costs("train", 0, 40)[:, 1].tolist().count(0) == 1
    with pytest.raises(ValueError, match=r"rows\.parquet:22: "):
        opened(path, bad_samples="refuse")
    path.write_bytes(data[:-9])
    run = options_of(*command(path))
    with pytest.raises(UserError, match=rf"^--data {path}: [^/]*footer[^/]*$"):
        make_source(run.args, run.preset)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"Parquet needs pyarrow: pip install '\.\[parquet\]'$"):
        make_source(run.args, run.preset)
