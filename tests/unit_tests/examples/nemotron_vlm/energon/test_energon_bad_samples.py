# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples that are bad or too long: named, and left out, cut or refused, as the options say."""

import json
import os
import re
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml

from examples.mimo.nemotron_vlm.data.sample import IMAGES
from examples.mimo.nemotron_vlm.energon.__main__ import main
from examples.mimo.nemotron_vlm.energon.survey import make_survey
from tests.e2e.launch import forked, wait_until
from tests.e2e.test_asynchronous_saves import lives
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    CRUDE,
    ENCODERS,
    byte_tokenizer,
    damage_image,
    image,
    make_shard,
    names,
    source,
    survey,
)

TRAIN = 84


class TestBadSamples:
    def test_of_a_shard_cut_short_or_missing_are_named(self, copied, surveyed):
        shard = copied / "train-0002.tar"
        with tarfile.open(shard) as tar:
            keys = sorted({m.name.partition(".")[0] for m in tar})
            cut = [m for m in tar.getmembers() if m.name.startswith(keys[10])][-1]
        with open(shard, "r+b") as file:
            file.truncate(cut.offset_data + 10)
        (copied / "train-0003.tar").unlink()
        printed = surveyed()
        found = re.findall(r"^    (\S+): ", printed, re.MULTILINE)
        assert found[:14] == [f"train-0002.tar/{key}" for key in keys[10:]]
        assert [Path(name).parent.name for name in found[14:]] == ["train-0003.tar"] * 12
        assert source(copied).left_out("train") == {"unreadable shard": 26}
        text = printed[printed.index("  unreadable") :]
        assert text.count(str(copied)) == 1, "its name is before the held-out samples alone"
        assert re.search(r"train-0003.tar/\S+: \[Errno 2\] No such file or directory\n", text)
        assert "Unexpected end of tar file\n" in text

    def test_say_what_is_wrong_in_plain_words(self, digits, tmp_path, capsys):
        talk = json.dumps({"caption": "3", "prompt": "copy"}).encode()
        samples = [
            {"json": talk, "webp": image(16, 16, "WEBP")},
            {"json": talk, "heic": b"something"},
            {"json": talk, "png": b"something"},
            {"json": json.dumps({"caption": "3", "fps": {"a": "b"}}).encode()},
            {"json": talk, "mp3": b"something"},
        ]
        make_shard(tmp_path, samples, CRUDE)
        assert main([str(tmp_path), "--tokenizer-model", str(digits / "tokenizer")]) == 0
        printed = capsys.readouterr().out
        for line in (
            f"{tmp_path} train: 5 samples in 1 shards, 1 good, 0 of them text only",
            "  unread format: 2\n    a.tar/1: heic: a format that Pillow does not read",
            "    a.tar/4: mp3: convert it to wav or flac",
            "  bad image: 1\n    a.tar/2: image 1: damaged, or not what its name says: Pillow ",
            '    a.tar/3: its fps is {"a": "b"}, no number ',
            f"{tmp_path}: has no samples for val or test: Invalid split part: 'test'",
        ):
            assert line in printed

    def test_are_texts_that_no_tokenizer_takes_or_no_key_explains(self, digits, tmp_path, capsys):
        tokenizer = byte_tokenizer(tmp_path / "tokenizer", None, ["<image>"])
        ask, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        talks = [
            [ask, answer],
            [ask, answer | {"content": "nice \ud83d"}],
            [answer, ask, answer],
            [ask, answer, ask],
            [ask, answer | {"reasoning_content": "c"}],
            [ask, answer | {"\ud83d": 1}],
        ]
        talks = [json.dumps({"messages": talk}).encode() for talk in talks]
        make_shard(tmp_path, [{"json": talk} for talk in [*talks, b"[" * 100_000]], CRUDE)
        assert main([str(tmp_path), "--tokenizer-model", str(tokenizer)]) == 0
        printed = capsys.readouterr().out
        for line in (
            f"{tmp_path} train: 7 samples in 1 shards, 2 good, 2 of them text only",
            "  asked   2: the template's prompt\n",
            "  bad text: 5\n    a.tar/1: the tokenizer refuses it: half a character, '\\ud83d', ",
            "    a.tar/3: ends with a turn of user, which has no answer\n",
            "    a.tar/4: the chat template does not know reasoning_content\n",
            '    a.tar/5: message 2 has "\\ud83d", which is not understood\n',
            "    a.tar/6: ",
        ):
            assert line in printed

    def test_images_are_left_out_or_refused_until_they_are_surveyed_again(
        self, digits, copied, surveyed
    ):
        damaged = damage_image(copied, "train-0001.tar")
        survey(copied)
        for make in ENCODERS.values():
            given = {"encoder": make(copied / "tokenizer"), "seq_length": 64}
            assert source(copied, **given).left_out("train") == {"bad image": 1}
            assert damaged not in names(source(copied, **given), "train", range(TRAIN - 1))
            with pytest.raises(ValueError, match=f"1 bad samples in train: {damaged}: "):
                source(copied, bad_samples="refuse", **given)
        (copied / "train-0001.tar").write_bytes((digits / "train-0001.tar").read_bytes())
        assert "bad image: 1" in surveyed()
        assert "bad image" not in surveyed("--again")
        assert source(copied, bad_samples="refuse").fingerprint == source(digits).fingerprint

    def test_that_are_too_long_are_left_out(self, digits):
        opened, whole = source(digits, seq_length=20), source(digits)
        tokens = whole.costs("train", 0, TRAIN)[:, 0]
        long = int((tokens > 20).sum())
        assert 0 < long == opened.left_out("train")["too long"]
        assert opened.epoch_size("train") == TRAIN - long
        assert opened.costs("train", 0, 2 * TRAIN)[:, 0].max() <= 20
        refused = (
            rf"{long} long samples in train: train-\S+: \d+ tokens, 20 fit; .*; "
            f"and {long - 3} more; leave them out with --long-samples skip"
        )
        assert source(digits, seq_length=20, bad_samples="refuse").left_out("train")
        with pytest.raises(ValueError, match=refused):
            source(digits, seq_length=20, long_samples="refuse")
        refused = "none of 84 samples of train can be used: 84 too long; a sequence has 3 tokens"
        with pytest.raises(ValueError, match=refused):
            source(digits, seq_length=3)

    def test_that_are_too_long_are_cut_if_their_media_and_an_answers_token_fit(
        self, digits, tmp_path
    ):
        """Images are before the first answer, or after it; the third sample has none."""
        answers = [{"from": "human", "value": "copy"}, {"from": "gpt", "value": "3 4 5"}]
        late = [*answers, {"from": "human", "value": "copy <image>"}, answers[1]]
        talks = [json.dumps({"conversations": turns}).encode() for turns in (answers, late)]
        samples = [{"json": talk, "png": image(16, 32)} for talk in talks]
        make_shard(tmp_path, [*samples, {"json": talks[0]}], CRUDE)
        tokenizer = digits / "tokenizer"
        survey(tmp_path, tokenizer, splits=["train"])
        plain = source(tmp_path, tokenizer, seq_length=99)
        texts = {plain.name("train", n): plain.text("train", n) for n in range(3)}
        counts, prints, image_token = set(), [plain.fingerprint], plain.token_ids[IMAGES]
        for length in range(9, 32):
            opened = source(tmp_path, tokenizer, seq_length=length, long_samples="cut")
            fitting = {
                name
                for name, text in texts.items()
                if text.loss_mask[:length].any() and image_token not in text[0][length:]
            }
            numbers = range(opened.epoch_size("train"))
            assert {opened.name("train", number) for number in numbers} == fitting
            assert opened.left_out("train").get("too long", 0) == 3 - len(fitting)
            for number in numbers:
                found, whole = opened.text("train", number), texts[opened.name("train", number)]
                assert opened.costs("train", number, 1)[0, 0] == len(found.input_ids) <= length
                for part, wanted in zip(found, whole, strict=True):
                    assert torch.equal(part, wanted[:length])
            counts.add(len(fitting))
            if any(len(texts[name].input_ids) > length for name in fitting):
                prints.append(opened.fingerprint)
        assert counts == {1, 2, 3}
        assert len(prints) == len(set(prints)) > 3, "what is cut elsewhere is other data"

    def test_are_not_those_that_the_data_excludes(self, copied):
        path = copied / ".nv-meta" / "split.yaml"
        split = yaml.safe_load(path.read_text()) | {"exclude": ["train-0000.tar/train-000003"]}
        path.write_text(yaml.dump(split))
        survey(copied)
        opened = source(copied, bad_samples="refuse")
        assert opened.left_out("train") == {"excluded by split.yaml": 1}
        assert "train-0000.tar/train-000003" not in names(opened, "train", range(TRAIN - 1))

    def test_that_are_others_than_in_the_survey_are_named(self, copied, extra):
        survey(copied)
        opened = source(copied)
        (copied / "train-0003.tar").write_bytes((extra / "train-0000.tar").read_bytes())
        last = [n for n in range(TRAIN) if "train-0003" in opened.name("train", n)]
        with pytest.raises(ValueError, match="train-0003.tar/train-0000.* has changed since"):
            for number in last:
                opened.text("train", number)


class Endless:
    """A data set whose only sample is never read; the file gets the process that reads it."""

    shards, ends = [SimpleNamespace(name="shard", count=1)], [0, 1]

    def __init__(self, path: Path) -> None:
        self.path = path

    def raw(self, _index: int):
        (self.path / "partial").write_text(str(os.getpid()))
        (self.path / "partial").rename(self.path / "reading")
        time.sleep(600)


def test_processes_of_a_survey_that_is_killed_end(tmp_path):
    survey = forked(make_survey, Endless(tmp_path), SimpleNamespace(settings={}), tmp_path, 1)
    wait_until((tmp_path / "reading").exists, 60)
    process = psutil.Process(int((tmp_path / "reading").read_text()))
    survey.kill()
    try:
        wait_until(lambda: not lives(process), 10)
    finally:
        if lives(process):
            process.kill()
