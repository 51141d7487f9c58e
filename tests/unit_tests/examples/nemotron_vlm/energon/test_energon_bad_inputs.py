# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Whatever a sample holds, it is read, or a survey counts and names it in a line."""

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.mimo.nemotron_vlm.energon import images
from examples.mimo.nemotron_vlm.energon.__main__ import main
from examples.mimo.nemotron_vlm.energon.conversation import Chat, Turn
from examples.mimo.nemotron_vlm.energon.encoding import Encoder
from examples.mimo.nemotron_vlm.energon.errors import BadMedium
from examples.mimo.nemotron_vlm.energon.images import Resizing
from examples.mimo.nemotron_vlm.energon.records import Medium
from examples.mimo.nemotron_vlm.energon.store import open_split
from examples.mimo.nemotron_vlm.energon.survey import STATES, load_survey
from examples.mimo.nemotron_vlm.energon.videos import Watching
from examples.mimo.nemotron_vlm.model.names import IMAGES
from tests.unit_tests.examples.nemotron_vlm.energon import digits_data
from tests.unit_tests.examples.nemotron_vlm.energon.media_files import (
    colours,
    mp4,
    mp4_without_video,
    noise,
    saved,
    sound,
)

PNG, ASK = digits_data.image(16, 16), {"role": "user", "content": "a"}


def of(text: object, **files: bytes) -> dict[str, bytes]:
    """Return a sample with a json."""
    return {"json": text if isinstance(text, bytes) else json.dumps(text).encode()} | files


def talk(*turns: dict | str, **files: bytes) -> dict[str, bytes]:
    """Return a sample of messages; a user says the texts."""
    turns = [{"role": "user", "content": t} if isinstance(t, str) else t for t in turns]
    return of({"messages": turns}, **files)


def answer(text="b", **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def last(who: str = "role", what: str = "content", **more) -> dict[str, bytes]:
    """Return a question and an answer with more keys, as messages or as conversations."""
    turns = [{who: "user", what: "a"}, {who: "assistant", what: "b"} | more]
    return of({"messages" if who == "role" else "conversations": turns})


def with_media(**files: bytes) -> dict[str, bytes]:
    """Return a sample of files, named by suffix, and a caption."""
    return of({"caption": "3"}, **files)


def clip(*frames: bytes) -> dict[str, bytes]:
    return with_media(**{f"video.{number}.png": frame for number, frame in enumerate(frames)})


def one(value: float, rate: int = 16000, depth: str = "FLOAT") -> dict[str, bytes]:
    """Return a sound that ends with a sample of this value."""
    return with_media(wav=sound(np.append(np.zeros(999), value), rate, depth=depth))


UNKNOWN, REASONS = "which is not understood", "message 2: its reasoning is no one text"
TEXTS = [
    (of(b"{"), "its json is damaged"),
    (of(b"[" * 100_000), ""),
    (of([]), "its json is no object"),
    (of({}), "has neither conversations, messages nor a caption"),
    (of({"conversations": "hello"}), "conversations is no list of"),
    (of({"conversations": [{"from": "x", "value": ""}]}), 'unknown role "x"; known: system, user'),
    (of({"conversations": [{"from": {"a": 1}, "value": ""}]}), 'unknown role {"a": 1};'),
    (of({"caption": 3}), "a content is no text, and no list of items of type text"),
    (of({"caption": "a", "mood": 1}), f'its json has "mood", {UNKNOWN}'),
    (of({"caption": "a", "messages": []}), 'its json has "caption"'),
    (of({"caption": "a", "tools": "[]"}), "its tools are no list of objects"),
    (of({"caption": "a", "chat_template_kwargs": []}), "its chat_template_kwargs are no object"),
    (of({"caption": "a", "fps": {"a": "b"}}), r'its fps is {"a": "b"}, no number'),
    (last("from", "value", loss=0.5), r"message 2: a loss or weight of \[0.5\], not of 0 or 1"),
    (last("from", "value", tone="x"), f'message 2 has "tone", {UNKNOWN}'),
    (last(weight=0, loss=True), r"message 2: a loss or weight of \[true, 0\]"),
    (last(mood="x"), f'message 2 has "mood", {UNKNOWN}'),
    (last(**{"\ud83d": 1}), r'message 2 has "\\ud83d", ' + UNKNOWN),
    (last(tool_call_id="x"), 'message 2 has "tool_call_id"'),
    (last(tool_calls={}), "message 2: its tool_calls are no list of objects"),
    (last(reasoning="a", thinking="b"), REASONS),
    (last(reasoning_content=["a"]), REASONS),
    (last(content=None), "a content is no text, and no list of items of type text"),
    (last(content=["a"]), "a content is no text, and no list of items of type text"),
    (last(content=[{"type": "text", "text": "a", "mood": 1}]), 'an item of type text has "mood"'),
    (last(content=[{"type": "image", "detail": "low"}]), 'an item of type image has "detail"'),
    (last(role="critic"), 'unknown role "critic"; known: system, user, assistant, tool'),
    (last(role="user", loss=True), "message 2: the loss is on the assistant's turns alone"),
    (last(content=""), "an answer is empty"),
    (last(content="nice \ud83d"), r"the tokenizer refuses it: half a character, '\\ud83d'"),
    (talk("b"), "needs a user's turn and an assistant's answer"),
    (talk(answer()), "needs a user's turn and an assistant's answer"),
    (talk(ASK, answer(), ASK), "ends with a turn of user, which has no answer"),
    (talk("<image>", answer(), **{"1.png": PNG, "2.png": PNG}), "1 <image> for 2 images"),
    (talk("b", answer("<image>"), png=PNG), "<image> outside of the user's turns"),
    (talk("b", answer("panic")), r"Panic: \\ud83d !"),
    (talk("b", answer("a <so_embedding>")), "its text has the token <so_embedding>"),
]
GREYS, SHORT = "convert its greys of 32 bits", "damaged: the file is shorter than its header says"
MEDIA = [
    (with_media(heic=b"something"), "bad image: image 1: damaged, or in a format that is not read"),
    (with_media(aac=b"something"), "bad sound: sound 1: damaged, or in a format that is not read"),
    (with_media(webm=b"something"), "bad video: video 1: frame 1: damaged, or in a format that is"),
    *(
        (with_media(png=data), f"bad image: image 1: .*{why}")
        for data, why in (
            (b"", "Pillow finds no image"),
            (b"something", "damaged, or in a format that is not read: Pillow finds no image"),
            (digits_data.image(8, 8, "EPS"), "Pillow finds no image"),
            (saved(Image.new("I", (4, 4), 70000), "TIFF"), f"mode I: {GREYS}"),
            (saved(Image.new("F", (4, 4), 0.5), "TIFF"), f"mode F: {GREYS}"),
            (saved(Image.new("1", (20000, 5000)), "PNG"), "exceeds limit of 89478485 pixels"),
            (saved(Image.new("1", (20000, 10000)), "PNG"), "exceeds limit of 178956970 pixels"),
            (saved(colours(), "JPEG")[:-50], "truncated"),
        )
    ),
    (with_media(png=digits_data.image(13, 13)), "bad image: image 1: damaged: MemoryError"),
    (with_media(**{"1.png": PNG, "2.png": b"nothing"}), "bad image: image 2: damaged"),
    *(
        (one(*of_sound), f"bad sound: sound 1: {why}")
        for *of_sound, why in (
            (np.nan, "a sample of nan"),
            (-np.inf, 44100, "DOUBLE", "a sample of inf"),
            (1e300, 16000, "DOUBLE", "a sample of inf"),  # as fp32
            (32767, "a sample of 32767"),
            (-17, 44100, "a sample of 17: .* -1 to 1, 16 at most"),
            (0, 7, "7 samples a second; from 1000 to 1000000 are read"),
        )
    ),
    (with_media(wav=b""), "bad sound: sound 1: damaged, or in a format that is not read"),
    (with_media(wav=sound(np.zeros(0))), "bad sound: sound 1: 0 samples, of 16000 a second, are"),
    (with_media(wav=sound(np.zeros(319))), "bad sound: sound 1: 319 samples, .* less than 320"),
    (with_media(wav=noise()[:-2]), f"bad sound: sound 1: {SHORT}"),
    (with_media(flac=noise(kind="FLAC")[:-200]), "bad sound: sound 1: "),
    (
        clip(digits_data.image(32, 24), digits_data.image(24, 32)),
        "bad video: video 1: 2 of 2 frames, of 2 sizes",
    ),
    (clip(PNG, b"nothing"), "bad video: video 1: frame 2: damaged, or in a format"),
    (with_media(mp4=b"\0\0\0\x20ftyp" + bytes(99)), "bad video: video 1: .*Invalid data found"),
    (with_media(mp4=mp4_without_video()), "bad video: video 1: an MP4 file without video"),
]
BAD = [*((sample, f"bad text: {reason}") for sample, reason in TEXTS), *MEDIA]
"""Samples that cannot be used, each with the kind and the reason that a survey names."""
GOOD = [talk(ASK, answer()), talk(answer("Hi"), ASK, answer())]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    return digits_data.byte_tokenizer(path, None, ["<image>", "<so_embedding>"])


class Panic(BaseException):
    """Stands for a panic of code in Rust."""


@pytest.fixture
def libraries_raise(monkeypatch) -> None:
    """A tokenizer and a decoder raise what no library says that it does."""
    encode, turned = Chat.encode, images.ImageOps.exif_transpose

    def panicking(chat: Chat, turns: list[Turn], *rest):
        if turns[-1].text == "panic":
            raise Panic("\ud83d\n!")
        return encode(chat, turns, *rest)

    def failing(file: Image.Image, **how) -> Image.Image | None:
        if file.width == 13:
            raise MemoryError
        return turned(file, **how)

    monkeypatch.setattr(Chat, "encode", panicking)
    monkeypatch.setattr(images.ImageOps, "exif_transpose", failing)


def test_bad_samples_are_named_with_their_reasons_and_counted_by_kind(
    tmp_path, tokenizer, libraries_raise, capsys
):
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


def test_strips_images_without_area_and_clips_of_unknown_speed_are_named(monkeypatch):
    resizing = Resizing(replace(digits_data.GRIDS, max_patches=10**6))
    with pytest.raises(BadMedium, match="image 1: 4 × 200000 pixels are too long a strip"):
        Encoder(None, resizing).read([Medium(IMAGES, (digits_data.image(4, 200000),))])
    with pytest.raises(BadMedium, match='needs "fps" in its json'):
        Watching(digits_data.CLIPS, fps=2.0).frames_of((PNG, PNG), 0.0)
    monkeypatch.setattr(images.Image, "open", lambda *_, **__: images.Image.new("RGB", (0, 7)))
    with pytest.raises(BadMedium, match="image 1: 0 × 7 pixels"):
        digits_data.READER.read([Medium(IMAGES, (b"",))])


SOUND_SAID = "sound needs soundfile, soxr: pip install '.[sound]'"


@pytest.mark.parametrize(
    ("package", "media", "workers", "said"),
    [
        ("soundfile", {"wav": noise()}, "0", SOUND_SAID),
        ("soundfile", {"wav": noise()}, "1", SOUND_SAID),
        ("soxr", {"wav": noise()}, "0", SOUND_SAID),
        ("av", {"mp4": mp4()}, "0", "MP4 needs PyAV: pip install '.[mp4]'"),
    ],
    ids=range(4),
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
