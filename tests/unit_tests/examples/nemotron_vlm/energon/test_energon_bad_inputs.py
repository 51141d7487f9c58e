# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Whatever a sample holds, it is read, or a survey counts and names it in a line."""

import io
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image, features

from examples.mimo.nemotron_vlm.energon import images
from examples.mimo.nemotron_vlm.energon.__main__ import main
from examples.mimo.nemotron_vlm.energon.conversation import VIDEO, Chat, Turn
from examples.mimo.nemotron_vlm.energon.encoding import Encoder
from examples.mimo.nemotron_vlm.energon.errors import BadMedium
from examples.mimo.nemotron_vlm.energon.images import Resizing
from examples.mimo.nemotron_vlm.energon.records import Medium
from examples.mimo.nemotron_vlm.energon.store import open_split
from examples.mimo.nemotron_vlm.energon.survey import STATES, load_survey
from examples.mimo.nemotron_vlm.energon.videos import Watching
from examples.mimo.nemotron_vlm.model.names import IMAGES, SOUND
from tests.unit_tests.examples.nemotron_vlm.energon import digits_data
from tests.unit_tests.examples.nemotron_vlm.energon.media_files import (
    DEEP,
    mp4,
    noise,
    saved,
    sound,
)

PNG = digits_data.image(16, 16)
ASK, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def of(text: object, **files: bytes) -> dict[str, bytes]:
    """Return a sample with a json, and files by suffix."""
    return {"json": text if isinstance(text, bytes) else json.dumps(text).encode()} | files


def talk(*turns: dict, **files: bytes) -> dict[str, bytes]:
    """Return a sample of messages."""
    return of({"messages": turns}, **files)


def last(**more) -> dict[str, bytes]:
    """Return a question and an answer with more keys, as messages."""
    return talk(ASK, ANSWER | more)


def with_media(**files: bytes) -> dict[str, bytes]:
    return of({"caption": "3"}, **files)


def of_sound(value: float, rate: int = 16000) -> dict[str, bytes]:
    """Return a sound that ends with a sample of this value."""
    return with_media(wav=sound(np.append(np.zeros(999), value), rate, depth="FLOAT"))


def from_a_pipe() -> bytes:
    """Return a FLAC file that does not say how many samples it has."""
    data = noise(kind="FLAC")
    return data[:21] + bytes([data[21] & 0xF0, 0, 0, 0, 0]) + data[26:]


TEXTS = [
    (of(b"{"), "its json is damaged"),
    (of(b"[" * 100_000), ""),
    (of([]), "its json is no object"),
    (of({}), "has neither conversations, messages nor a caption"),
    (of({"conversations": "hello"}), "conversations is no list of"),
    (of({"conversations": [{"from": "x", "value": ""}]}), 'unknown role "x"; known: system, user'),
    (of({"caption": "a", "mood": 1}), 'its json has "mood", which is not understood'),
    (of({"caption": "a", "tools": "[]"}), "its tools are no list of objects"),
    (of({"caption": "a", "chat_template_kwargs": []}), "its chat_template_kwargs are no object"),
    (of({"caption": "a", "fps": {"a": "b"}}), r'its fps is {"a": "b"}, no number'),
    (last(loss=0.5), r"message 2: a loss or weight of \[0.5\], not of 0 or 1"),
    (last(weight=0, loss=True), r"message 2: a loss or weight of \[true, 0\]"),
    (last(mood="x"), 'message 2 has "mood", which is not understood'),
    (last(tool_calls={}), "message 2: its tool_calls are no list of objects"),
    (last(reasoning="a", thinking="b"), "message 2: its reasoning is no one text"),
    (last(reasoning_content=["a"]), "message 2: its reasoning is no one text"),
    (last(content=None), "a content is no text, and no list of items of type text"),
    (last(content=[{"type": "image", "detail": "low"}]), 'an item of type image has "detail"'),
    (last(role="user", loss=True), "message 2: the loss is on the assistant's turns alone"),
    (last(content=""), "an answer is empty"),
    (last(content="nice \ud83d"), r"the tokenizer refuses it: half a character, '\\ud83d'"),
    (talk(ASK), "needs a user's turn and an assistant's answer"),
    (talk(ASK, ANSWER, ASK), "ends with a turn of user, which has no answer"),
    (talk(ASK | {"content": "<image>"}, ANSWER), "1 <image> for 0 images"),
    (talk(ASK, ANSWER | {"content": "<image>"}, png=PNG), "<image> outside of the user's turns"),
    (last(content="panic"), r"Panic: \\ud83d !"),
    (last(content="a <so_embedding>"), "its text has the token <so_embedding>"),
]
MEDIA = [
    (with_media(webm=b"something"), "bad video: video 1: frame 1: damaged, or in a format that is"),
    (with_media(png=digits_data.image(8, 8, "EPS")), "bad image: image 1: .* finds no image"),
    (with_media(png=saved(Image.new("F", (4, 4)), "TIFF")), "bad image: .* mode F: convert its"),
    (with_media(png=saved(Image.new("1", (20000, 5000)), "PNG")), "bad image: .* exceeds limit of"),
    (with_media(**{"1.png": PNG, "2.png": b""}), "bad image: image 2: .* finds no image"),
    (of_sound(np.nan), "bad sound: sound 1: a sample of nan"),
    (of_sound(-17), "bad sound: sound 1: a sample of 17: .* -1 to 1, 16 at most"),
    (of_sound(0, 7), "bad sound: sound 1: 7 samples a second; from 1000 to 1000000 are read"),
    (with_media(aac=b"something"), "bad sound: sound 1: damaged, or in a format that is not read"),
    (with_media(wma=b"something"), "bad sound: sound 1: damaged, or in a format that is not read"),
    (with_media(mpg=b"something"), "bad video: video 1: frame 1: damaged, or in a format that is"),
    (with_media(wav=sound(np.zeros(319))), "bad sound: sound 1: 319 samples, .* less than 320"),
    (with_media(wav=noise()[:-2]), "bad sound: sound 1: damaged: .* shorter than its header"),
    (with_media(flac=noise(kind="FLAC")[:-200]), "bad sound: sound 1: "),
    (with_media(flac=from_a_pipe()), "bad sound: .* does not say how many samples it has: convert"),
    (
        with_media(mp3=noise(kind="MP3", depth="MPEG_LAYER_III")[:-400]),
        "bad sound: sound 1: damaged: .* shorter than its header",
    ),
    (
        with_media(**{"video.0.png": PNG, "video.1.png": digits_data.image(24, 32)}),
        "bad video: video 1: 2 of 2 frames, of 2 sizes",
    ),
    (with_media(mp4=b"\0\0\0\x20ftyp" + bytes(99)), "bad video: video 1: .*Invalid data found"),
]
BAD = [*((sample, f"bad text: {reason}") for sample, reason in TEXTS), *MEDIA]
"""Samples that cannot be used, each with the kind and the reason that a survey names."""
GOOD = [talk(ASK, ANSWER), talk(ANSWER, ASK, ANSWER)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    return digits_data.byte_tokenizer(path, None, ["<image>", "<so_embedding>"])


class Panic(BaseException):
    """Stands for a panic of code in Rust."""


def test_bad_samples_are_named_with_their_reasons_and_counted_by_kind(
    tmp_path, tokenizer, monkeypatch, capsys
):
    encode = Chat.encode

    def panicking(chat: Chat, turns: list[Turn], *rest):
        if turns[-1].text == "panic":
            raise Panic("\ud83d\n!")
        return encode(chat, turns, *rest)

    monkeypatch.setattr(Chat, "encode", panicking)
    digits_data.make_shard(tmp_path, [*(sample for sample, _ in BAD), *GOOD], digits_data.CRUDE)
    words = [str(tmp_path), "--tokenizer-model", str(tokenizer), "--model", "tiny-omni"]
    assert main([*words, "--dynamic-resolution", "--names", "1"]) == 0
    printed = capsys.readouterr().out
    bad = load_survey(open_split(tmp_path, "train").datasets[0], digits_data.omni(tokenizer)).bad
    assert all(sample.name == f"a.tar/{sample.index}" for sample in bad)
    reasons = {sample.index: f"{STATES[sample.state]}: {sample.reason}" for sample in bad}
    assert reasons.keys() == set(range(len(BAD)))
    wrong = [(why, reasons[n]) for n, (_, why) in enumerate(BAD) if not re.match(why, reasons[n])]
    assert not wrong and all(map(str.isprintable, reasons.values()))
    assert f" train: {len(BAD) + 2} samples in 1 shards, 2 good, 2 of them text only\n" in printed
    assert "  asked   2: the template's prompt\n" in printed
    counts = Counter(reason.partition(":")[0] for reason in reasons.values())
    for kind, count in counts.items():
        number, first = next(each for each in reasons.items() if each[1].startswith(kind))
        line = first.removeprefix(f"{kind}: ")
        assert f"  {kind}: {count}\n    a.tar/{number}: {line}\n" in printed
    assert len(counts) == 4


def test_media_that_a_model_does_not_take_are_named(monkeypatch):
    def check(encoder: Encoder, kind: str, *files: bytes, reason: str) -> None:
        with pytest.raises(BadMedium, match=reason):
            encoder.read([Medium(kind, files)])

    plain = Encoder(None, Resizing(replace(digits_data.GRIDS, max_patches=10**6)))
    strip = digits_data.image(4, 200000)
    check(plain, IMAGES, strip, reason="image 1: 4 × 200000 pixels are too long a strip")
    check(plain, SOUND, b"", reason="sound 1: the model has no encoder of sound")
    check(plain, VIDEO, b"", reason="video 1: the model encodes no video")
    timed = replace(plain, video=Watching(digits_data.CLIPS, fps=2.0))
    check(timed, VIDEO, PNG, PNG, reason='needs "fps" in its json')
    monkeypatch.setattr(images.Image, "open", lambda *_, **__: images.Image.new("RGB", (0, 7)))
    check(plain, IMAGES, b"", reason="image 1: 0 × 7 pixels")


@pytest.mark.parametrize(
    ("package", "media", "workers", "said"),
    [
        ("soundfile", {"wav": noise()}, "1", "sound needs soundfile, soxr: pip install '.[sound]'"),
        ("av", {"mp4": mp4()}, "0", "MP4 needs PyAV: pip install '.[mp4]'"),
    ],
    ids=range(2),
)
def test_a_missing_package_ends_a_survey(
    tmp_path, tokenizer, monkeypatch, capsys, package, media, workers, said
):
    """Loading processes add a traceback to an error, for each package alike."""
    monkeypatch.delitem(sys.modules, package, raising=False)
    (tmp_path / f"{package}.py").write_text("raise ModuleNotFoundError")
    monkeypatch.syspath_prepend(tmp_path)
    digits_data.make_shard(tmp_path, [with_media(**media)], digits_data.CRUDE)
    words = [str(tmp_path), "--tokenizer-model", str(tokenizer), "--model", "tiny-omni"]
    assert main([*words, "--dynamic-resolution", "--workers", workers]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {said}"


def test_a_codec_that_cannot_seek_is_no_damage():
    data = noise(8000, depth="GSM610")
    (read,) = digits_data.READER.read([Medium(SOUND, (data,))])
    assert read.extent.size >= 4000


@pytest.mark.skipif(not features.check("avif"), reason="Pillow has no decoder of AVIF")
def test_frames_that_begin_as_mp4_does_are_images():
    files = tuple(saved(Image.new("RGB", (16, 16), (60 * n, 0, 0)), "AVIF") for n in range(4))
    extent, frames = digits_data.READER.video.frames_of(files, 2.0)
    assert len(frames) == extent.frames == 4 and extent.fps == 2


def test_greys_of_16_bits_may_be_a_negative():
    """White is 0 in X-rays; FFmpeg reads them so."""
    data = saved(Image.fromarray(DEEP), "TIFF", tiffinfo={images.PHOTOMETRIC: 0})
    with av.open(io.BytesIO(data)) as file:
        greys = next(file.decode(video=0)).to_ndarray()
    assert greys[0, 0] == 65535
    shown = np.array(images.open_image(data)[0])[..., 0]
    assert np.array_equal(shown, np.round(greys / 65535 * 255))
