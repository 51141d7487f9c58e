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
from examples.mimo.nemotron_vlm.energon import files
from examples.mimo.nemotron_vlm.energon.__main__ import main
from examples.mimo.nemotron_vlm.energon.store import open_split
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import image, names, omni, source
from tests.unit_tests.examples.nemotron_vlm.runs import options_of, trainer

TURNS = [{"from": "human", "value": "look <image>"}, {"from": "gpt", "value": "7"}]
KINDS = {"png": "image", "wav": "sound"}


def unpacked(shards: Path, folder: Path, suffix: str) -> Path:
    """Write what shards have as records, with clips in folders of frames beside them.

    Parquet has the other media in Hugging Face's form, one with a name and one without. JSONL has
    their paths, but for evaluation base64: images as data URIs, sounds as objects.
    """
    for split, name in (("train", "train"), ("test", "val")):
        (dataset,) = open_split(shards, split).datasets
        records = []
        for raw in map(dataset.raw, dataset.subset):
            record = json.loads(raw.pop("json"))
            for each in (key for key in raw if not key.startswith("__")):
                file = folder / f"media/{raw['__key__']}.{each}".replace(".video.", "/")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(raw[each])
                text = base64.b64encode(raw[each]).decode()
                if each not in ("png", "wav"):
                    record["video"] = f"media/{file.parent.name}"
                elif suffix == "parquet":
                    path = file.name if each == "wav" else ""
                    record[KINDS[each]] = {"bytes": raw[each], "path": path}
                elif name == "train":
                    record[KINDS[each]] = f"media/{file.name}"
                else:
                    uri = f"data:image/png;base64,{text}"
                    record[KINDS[each]] = uri if each == "png" else {"bytes": text}
            records.append(record)
        file = folder / f"{name}.{suffix}"
        if suffix == "jsonl":
            file.write_text("\n".join(map(json.dumps, records)))
            continue
        arrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
        names = set().union(*records)
        table = arrow.table({name: [record.get(name) for record in records] for name in names})
        parquet.write_table(table, file, row_group_size=7)
    return folder


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_samples_and_their_order_are_those_of_shards(omni_shards, tmp_path, suffix):
    """Training surveys the files by itself."""
    tokenizer = omni_shards / "tokenizer"
    of_files, of_shards = (
        source(path, tokenizer, encoder=omni(tokenizer), seq_length=64)
        for path in (unpacked(omni_shards, tmp_path, suffix), omni_shards)
    )
    for split, count in (("train", 84), ("test", 12)):
        for number in range(count):
            texts = of_files.text(split, number), of_shards.text(split, number)
            assert all(map(torch.equal, *texts))
            for name in ("images", "sound"):
                own, wanted = (each.inputs(split, number, name) for each in (of_files, of_shards))
                assert len(own) == len(wanted) and all(map(torch.equal, own, wanted))
    (first,) = names(of_files, "train", range(1))
    assert first.startswith(f"{tmp_path.name}/train.{suffix}:")


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


def command(path: Path) -> list[str]:
    return ["--data", str(path), "--tokenizer-model", str(path.parent / "tokenizer")]


def test_a_list_trains_as_it_is_and_every_fiftieth_record_is_held_out(photos):
    with trainer(*command(photos), "--eval-iters", "1", "--lr", "1e-3") as run:
        assert run.train_step()["loss"] > 0
    opened = source(photos, photos.parent / "tokenizer")
    held_out = {*names(opened, "test", range(3))}
    lines = [line for line, text in enumerate(photos.read_text().splitlines(), 1) if "id" in text]
    assert held_out == {f"{photos.parent.name}/photos.json:{lines[at] - 1}" for at in (0, 50, 100)}
    trained = {*names(opened, "train", range(117))}
    assert len(trained) == 117 and not trained & held_out
    photos.write_text(photos.read_text().replace('"7"', '"8"'))
    again = source(photos, photos.parent / "tokenizer")
    assert again.fingerprint != opened.fingerprint, "a changed list is surveyed again"


def test_a_large_file_is_surveyed_before(photos, monkeypatch, capsys):
    monkeypatch.setattr("examples.mimo.nemotron_vlm.energon.source.SMALL", 100)
    run = options_of(*command(photos))
    with pytest.raises(UserError, match=f"make one: python .* {photos} "):
        make_source(run.args, run.preset)
    assert main([str(photos), *command(photos)[2:]]) == 0
    assert "117 samples" in capsys.readouterr().out
    assert make_source(run.args, run.preset).text("train", 0)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"image": "photos/b.png"}, "photos/b.png: no such file"),
        ({"image": f"photos/{'b' * 300}.png"}, "file name too long"),
        ({"image": "photos/a.png/b.png"}, "not a directory"),
        ({"image": "photos"}, "has the name of no image file"),
        ({"image": 7}, "its image is 7, no path of a file"),
        ({"image": "data:image/png;base64,a"}, "its image is no base64"),
        ({"image": {"bytes": 7}}, "no path of a file"),
        ({"images": ["photos/a.png", None], "x": 1}, "x"),
        ('["photos/a.png"]', "its json is no object"),
        ('{"image": "photos/a.png"', "its json is damaged"),
    ],
)
def test_a_bad_record_is_named_by_its_line(photos, record, reason):
    good = json.dumps({"image": "photos/a.png", "conversations": TURNS})
    bad = record if isinstance(record, str) else json.dumps({"conversations": TURNS} | record)
    lines = [good] * 60 + ["", bad]
    path = photos.parent / "lines.jsonl"
    path.write_text("\n".join(lines))
    opened = source(path, photos.parent / "tokenizer")
    with pytest.raises(ValueError, match=rf"lines.jsonl:62\b.*{reason}"):
        source(path, photos.parent / "tokenizer", bad_samples="refuse").text("train", 0)
    assert len({*names(opened, "train", range(58))}) == 58


@pytest.mark.parametrize(
    ("text", "line"), [('[\n{"a": 1},\n{"a" 2}]', 3), ('{"a": 1}', 1), ("[1, 2", 1), ("", 1)]
)
def test_a_file_that_is_no_list_is_refused(tmp_path, text, line):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=rf"a\.json:{line}: "):
        files.FileSet(tmp_path / "a.json", "train")


def test_rows_of_parquet_are_read_as_lines_are(photos):
    """Each row group is a list of records; one is damaged, one names no image, one has no image."""
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
    opened = source(path, photos.parent / "tokenizer")
    assert opened.left_out("train") == {"unreadable shard": 20, "bad text": 1}
    assert opened.costs("train", 0, 40)[:, 1].tolist().count(0) == 1
    with pytest.raises(ValueError, match=r"rows\.parquet:22: "):
        source(path, photos.parent / "tokenizer", bad_samples="refuse")
    path.write_bytes(data[:-9])
    with pytest.raises(UserError, match=rf"^--data {path}: [^/]*footer[^/]*$"):
        run = options_of(*command(path))
        make_source(run.args, run.preset)


def test_parquet_without_its_package_names_the_cure(photos, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = photos.with_suffix(".parquet")
    path.touch()
    run = options_of(*command(path))
    with pytest.raises(UserError, match=r"Parquet needs pyarrow: pip install '\.\[parquet\]'$"):
        make_source(run.args, run.preset)
