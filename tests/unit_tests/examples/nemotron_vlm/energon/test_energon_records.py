# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Files of records and folders of media, with what editors, libraries and systems add to them."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.mimo.nemotron_vlm.energon.__main__ import main
from examples.mimo.nemotron_vlm.energon.files import FileSet
from examples.mimo.nemotron_vlm.energon.source import EnergonSource
from tests.unit_tests.examples.nemotron_vlm.energon import digits_data
from tests.unit_tests.examples.nemotron_vlm.energon.media_files import sound
from tests.unit_tests.examples.nemotron_vlm.energon.templates import CHATML

PNG = digits_data.image(16, 16)
TEXT = {"type": "text", "text": "3 + 4"}
ANSWER = {"role": "assistant", "content": "7"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    return digits_data.byte_tokenizer(path, CHATML, ["<image>", "<so_embedding>"])


def opened(file: Path, tokenizer: Path, *records: dict) -> EnergonSource:
    """Write records, a line each, and open the folder's data set."""
    (file / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    made = digits_data.omni(tokenizer)
    return digits_data.source(file, tokenizer, encoder=made, seq_length=4096)


def asked(*items: dict) -> dict:
    return {"messages": [{"role": "user", "content": [*items]}, ANSWER]}


def reasons(source: EnergonSource) -> list[str]:
    ((_, survey, _),) = source._stream("train")._numbered
    return [sample.reason for sample in survey.bad]


@pytest.mark.parametrize("left", [".DS_Store", "._1.png", "Thumbs.db", "desktop.ini"])
def test_what_a_program_leaves_in_a_clips_folder_is_no_frame(tmp_path, tokenizer, left):
    (tmp_path / "clip").mkdir()
    for name, data in (("1.png", PNG), ("2.png", PNG), (left, b"something")):
        (tmp_path / "clip" / name).write_bytes(data)
    source = opened(tmp_path, tokenizer, asked({"type": "video", "path": "clip"}))
    assert source.text("train", 0).loss_mask.sum() > 0
    assert [len(tubelets) for tubelets in source.inputs("train", 0, "images")] == [1]


def test_another_file_in_a_clips_folder_is_named(tmp_path, tokenizer):
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "1.png").write_bytes(PNG)
    (tmp_path / "clip" / "sound.wav").write_bytes(sound(np.zeros(999)))
    clip = asked({"type": "video", "path": "clip"})
    source = opened(tmp_path, tokenizer, clip, {"messages": [{**ANSWER, "role": "user"}, ANSWER]})
    assert reasons(source) == ["its video clip has sound.wav, no image"]


def test_sounds_have_the_order_of_their_items(tmp_path, tokenizer):
    for number, length in enumerate((3200, 6400, 1600)):
        (tmp_path / f"{number}.wav").write_bytes(sound(np.zeros(length)))
    kinds = "sound", "audio", "sound"
    items = ({"type": kind, "path": f"{number}.wav"} for number, kind in enumerate(kinds))
    source = opened(tmp_path, tokenizer, asked(*items))
    assert [*map(len, source.inputs("train", 0, "sound"))] == [3200, 6400, 1600]


def test_base64_in_the_place_of_a_path_does_not_fill_the_screen(tmp_path, tokenizer):
    text = {"messages": [{**ANSWER, "role": "user"}, ANSWER]}
    whole = base64.b64encode(bytes(99999)).decode()
    source = opened(
        tmp_path, tokenizer, text, text | {"image": whole}, text | {"image": f"{whole}.png"}
    )
    assert len(reasons(source)) == 2 and all(len(reason) < 500 for reason in reasons(source))


def test_a_byte_order_mark_is_no_text(tmp_path, tokenizer):
    """Some editors write a byte order mark before JSON, and before a caption."""
    for name, mark in (("a", ""), ("b", "\ufeff")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "list.json").write_text(mark + json.dumps([asked(TEXT), asked(TEXT)]))
        (folder / "lines.jsonl").write_text(f"{mark}{json.dumps(asked(TEXT))}\n" * 2)
        caption = {"png": PNG, "txt": f"{mark}a cat\r\n".encode()}
        digits_data.make_shard(folder, [caption], digits_data.CRUDE)
        digits_data.survey(folder, tokenizer, ["train"], [digits_data.omni])
    made = {"encoder": digits_data.omni(tokenizer), "seq_length": 4096}
    for file in ("list.json", "lines.jsonl", ""):
        sources = (digits_data.source(tmp_path / n / file, tokenizer, **made) for n in "ab")
        texts = [source.text("train", 0) for source in sources]
        assert all(map(torch.equal, *texts))


def test_arguments_of_tools_are_in_parquet_what_they_are_in_lines(tmp_path, tokenizer):
    """In Parquet, each object of a column has the keys of all its objects."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    calls = (
        {"name": "add", "arguments": {"numbers": [1, 2]}},
        {"name": "now", "arguments": {"h": 5}},
    )
    records = [
        {
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "assistant", "tool_calls": [call]},
            ]
        }
        for call in ({"function": each} for each in calls)
    ]
    (tmp_path / "lines").mkdir()
    lines = opened(tmp_path / "lines", tokenizer, *records)
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "train.parquet")
    rows = digits_data.source(tmp_path, tokenizer, encoder=lines._encoder, seq_length=4096)
    for number in range(2):
        assert all(map(torch.equal, rows.text("train", number), lines.text("train", number)))


def test_a_survey_with_the_tool_reads_media_that_were_mended(tmp_path, tokenizer, capsys, reads):
    (tmp_path / "0.png").write_bytes(PNG)
    (tmp_path / "1.png").write_bytes(PNG[:-30])
    records = [asked({"type": "image", "path": f"{number}.png"}, TEXT) for number in range(3)]
    assert opened(tmp_path, tokenizer, *records).left_out("train").total() == 2
    for name in ("1.png", "2.png"):
        (tmp_path / name).write_bytes(PNG)
    options = ["--tokenizer-model", str(tokenizer), "--model", "tiny-omni", "--dynamic-resolution"]
    for count in (3, 0):  # the second time, nothing has changed
        reads.clear()
        assert main([str(tmp_path), *options]) == 0
        assert "3 samples in 1 shards, 3 good" in capsys.readouterr().out
        assert len(reads) == count
    assert opened(tmp_path, tokenizer, *records).left_out("train").total() == 0


def test_a_record_that_shares_its_line_is_named_by_its_number(tmp_path):
    """json.dump writes all records of a list on one line."""
    (tmp_path / "a.json").write_text('[{"a": 1},\n{"a": 2}, {"a": 3}, {"a": 4}]')
    found = FileSet(tmp_path / "a.json", None)
    wanted = ["a.json:1", *(f"a.json:2 record {number}" for number in (2, 3, 4))]
    assert [*map(found.name, range(4))] == wanted
