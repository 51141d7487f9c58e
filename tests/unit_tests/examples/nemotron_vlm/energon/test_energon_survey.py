# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The survey: what it says of samples, what it leaves out, what to train with, and what it reads.

The survey of each shard is kept as it ends, and taken as long as nothing of it changes.
"""

import json
import os
import re
import shlex
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data import make_source
from examples.mimo.nemotron_vlm.data.rows import COUNTED, Packing, Rows, best_fit
from examples.mimo.nemotron_vlm.data.sample import SampleSource
from examples.mimo.nemotron_vlm.energon import files, stream
from examples.mimo.nemotron_vlm.energon.__main__ import main
from examples.mimo.nemotron_vlm.energon.store import DataSet
from examples.mimo.nemotron_vlm.model.names import IMAGES
from examples.mimo.nemotron_vlm.options.run import Run
from examples.mimo.nemotron_vlm.planner.plan import plan_of
from megatron.energon import BaseWebdatasetFactory
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    CRUDE,
    damage_image,
    encoder,
    image,
    make_shard,
    names,
    omni,
    source,
    survey,
)
from tests.unit_tests.examples.nemotron_vlm.runs import options_of

TRAIN = 84
ONE = {"splits": ["train"], "makes": [encoder]}


def test_one_that_is_missing_is_refused_with_the_command_that_makes_it(copied, tmp_path):
    line = f"--data energon:{copied} --tokenizer-model {copied}/tokenizer --surveys {tmp_path}/at"

    def opened(prompt: str) -> SampleSource:
        more = ["--max-tiles", "3", "--disable-thumbnail", "--prompt", prompt]
        options = options_of(*line.split(), *more)
        return make_source(options.args, options.preset)

    with pytest.raises(UserError, match="^[^\n]*no survey of train[^\n]*$") as refusal:
        opened("What is it?")
    command = shlex.split(str(refusal.value).partition("make one: ")[2])
    assert command[:2] == ["python", "-m"] and main(command[3:]) == 0
    assert opened("What is it?")
    with pytest.raises(UserError, match="no survey of train"):
        opened("Why?")


def test_bad_samples_are_named_and_left_out_or_refused_until_they_are_surveyed_again(
    digits, copied, surveyed, monkeypatch
):
    monkeypatch.setattr(stream, "PART", 7)
    path, excluded = copied / ".nv-meta" / "split.yaml", "train-0000.tar/train-000003"
    path.write_text(yaml.dump(yaml.safe_load(path.read_text()) | {"exclude": [excluded]}))
    damaged, shard = damage_image(copied, "train-0001.tar"), copied / "train-0002.tar"
    with tarfile.open(shard) as tar:
        cut = [m for m in tar.getmembers() if m.name.endswith(".json")][10]
    os.truncate(shard, cut.offset_data + 10)
    (copied / "train-0003.tar").unlink()
    printed = surveyed("--seq-length", "26")
    assert f"{copied} train: 84 samples in 4 shards, 56 good" in printed
    assert f"  bad image: 1\n    {damaged}: image 1: " in printed
    long = (
        r"  too long: (\d+), of which --long-samples cut keeps \1\n    train-\S+: \d+ tokens, 26 "
    )
    assert re.search(long, printed)
    unread = printed.partition("  unreadable shard: 26\n")[2]
    assert unread.startswith(f"    {shard.name}/{cut.name[:-5]}: unexpected end of data\n")
    assert re.search(r"train-0003.tar/\S+: \[Errno 2\] No such file or directory: ", unread)
    none = {"excluded by split.yaml": 1}
    assert source(copied).left_out("train") == none | {"bad image": 1, "unreadable shard": 26}
    whole = {f"train-000{n // 24}.tar/train-{n:06}" for n in range(58)}
    assert {*names(source(copied), "train", range(56))} == whole - {damaged, excluded}
    with pytest.raises(ValueError, match=f"27 bad samples in train: {damaged}: .* and 24 more"):
        source(copied, bad_samples="refuse")
    for number in range(1, 4):
        shutil.copy(digits / f"train-000{number}.tar", copied)
    assert "bad image: 1" in surveyed()
    assert "bad image" not in surveyed("--again")
    assert source(copied, bad_samples="refuse").left_out("train") == none
    (copied / "train-0001.tar").unlink()
    with pytest.raises(ValueError, match="1 shards are missing: train-0001.tar; .* with --again"):
        source(copied)


def test_samples_that_are_too_long_are_refused(digits):
    long = source(digits, seq_length=20, bad_samples="refuse").left_out("train")["too long"]
    refused = (
        rf"{long} long samples in train: train-\S+: \d+ tokens, 20 fit; .*; "
        f"and {long - 3} more; leave them out with --long-samples skip"
    )
    with pytest.raises(ValueError, match=refused):
        source(digits, seq_length=20, long_samples="refuse")
    refused = "none of 84 samples of train can be used: 84 too long; a sequence has 3 tokens"
    with pytest.raises(ValueError, match=refused):
        source(digits, seq_length=3)


def test_samples_are_cut_if_their_media_and_an_answers_token_fit(digits, tmp_path):
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


def test_it_recommends_a_length_and_tiles_and_says_what_others_leave_out(
    digits, surveyed, tmp_path
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
    (tmp_path / "run.yaml").write_text("max-tiles: 2")
    assert f"99 %: {most} " in surveyed("--config", f"{tmp_path}/run.yaml")


def test_it_is_what_the_planner_counts(omni_shards):
    tokenizer = omni_shards / "tokenizer"
    line = f"--data energon:{omni_shards} --tokenizer-model {tokenizer} --model tiny-omni"
    words = *line.split(), "--dynamic-resolution", "--seq-length", "64"
    planned = plan_of(Run.of(words, 1))
    opened = source(omni_shards, encoder=omni(tokenizer), seq_length=64, seed=1234)
    for inputs, layout in planned.encoders:
        each = inputs.encoder
        sizes = opened.sizes("train", 0, COUNTED, each.name)
        rows = sum(each.rows(row).sum() for row in sizes)
        assert inputs.mean(each.rows(inputs.sizes)) == rows / COUNTED
        of_inputs = [each.kept(row, layout) for row in sizes]
        kept = [row.sum() for row in of_inputs]
        largest = max(row.max(initial=0) for row in of_inputs)
        three = np.convolve(kept, np.ones(3), "valid").max()  # of rows in succession
        most = {0.5: max(max(kept) / 2, largest), 1: max(kept), 2.5: three * 2.5 / 3, 3: three}
        for rows, wanted in most.items():
            assert inputs.most_kept(layout, rows, frozenset()) == pytest.approx(wanted)
            assert inputs.most_kept(layout, rows, frozenset([(each.name, "encoder")])) < wanted
        assert max(kept) > 1.2 * np.mean(kept)  # rows differ
    packed = plan_of(Run.of([*words, "--pack", "--micro-batch-size", "1"], 1)).task.squares
    lengths = [len(opened.text("train", number).input_ids) for number in range(1024)]
    rows = best_fit([-(-length // 16) * 16 for length in lengths], 64)
    assert packed == pytest.approx(sum(length**2 for length in lengths) / len(rows))


def shards_of(reads) -> list[str]:
    """Return the shards that were read since the last call, in their order."""
    shards = list(dict.fromkeys(name.partition("/")[0] for name, _ in reads))
    reads.clear()
    return shards


def forget(path: Path) -> None:
    """Remove the surveys of whole data sets."""
    for file in (path / ".nv-meta").glob("survey-*"):
        file.unlink()


def prepare(path: Path, shards: list[str]) -> None:
    parts = [("train", "train-.*"), ("val", "val-.*")]
    BaseWebdatasetFactory.prepare_dataset(path, shards, split_parts_patterns=parts, workers=1)


def test_one_that_is_killed_before_shards_are_added_goes_on_with_the_others(
    copied, tmp_path, monkeypatch, reads
):
    """Its files equal the files of a survey that several processes make of all shards."""
    shards = sorted(file.name for file in copied.glob("*.tar"))
    prepare(copied, [shards[1], shards[3], shards[4]])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        name = DataSet.name

        def killed(dataset: DataSet, index: int) -> str:
            if (found := name(dataset, index)).startswith(shards[3]):
                raise KeyboardInterrupt
            return found

        patch.setattr(DataSet, "name", killed)
        survey(copied, **ONE)
    assert not [*copied.glob(".nv-meta/survey-*")]
    prepare(copied, shards)
    reads.clear()
    survey(copied, **ONE)
    assert shards_of(reads) == [shards[0], shards[2], shards[3]]
    survey(copied, folder=tmp_path / "other", workers=2, **ONE)
    made = [*(tmp_path / "other").glob("survey-*")]
    assert len(made) == 3
    for file in made:
        assert file.read_bytes() == (copied / ".nv-meta" / file.name).read_bytes()


def test_what_was_missing_is_damaged_or_has_been_replaced_is_read_again(copied, reads):
    """A shard that replaces another one may have its size and time."""
    missing, shard = copied / "train-0003.tar", copied / "train-0001.tar"
    missing.rename(copied / "away")
    survey(copied, **ONE)
    (copied / "away").rename(missing)
    forget(copied)
    kept = [*(copied / ".nv-meta" / "surveyed").iterdir()]
    assert len(kept) == 3
    first = min(kept, key=lambda file: file.stat().st_mtime_ns)
    first.write_bytes(first.read_bytes()[:-30])
    before = shard.stat()
    damage_image(copied, shard.name)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = shard.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    reads.clear()
    survey(copied, **ONE)
    assert shards_of(reads) == ["train-0000.tar", shard.name, missing.name]
    assert source(copied).left_out("train") == {"bad image": 1}
    survey(copied, **ONE, again=True)
    assert len(shards_of(reads)) == 4


def test_of_records_only_runs_that_changed_are_read(digits, tmp_path, monkeypatch, reads):
    monkeypatch.setattr(files, "CHUNK", 10)
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(image(16, 16))
    turns = [{"from": "human", "value": "look"}, {"from": "gpt", "value": "7"}]
    records = [{"image": f"{n // 10}.png", "conversations": turns} for n in range(35)]

    def surveyed(count: int) -> list[str]:
        reads.clear()
        (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records[:count])))
        survey(tmp_path, digits / "tokenizer", **ONE)
        return [name.partition(":")[2] for name, _ in reads]

    assert len(surveyed(25)) == 25
    assert surveyed(35) == [str(line) for line in range(21, 36)]
    forget(tmp_path)
    (tmp_path / "1.png").write_bytes(image(16, 32))
    (tmp_path / "3.png").unlink()
    assert surveyed(35) == [str(line) for line in (*range(11, 21), *range(31, 36))]
    assert source(tmp_path, digits / "tokenizer").left_out("train") == {"bad text": 5}
