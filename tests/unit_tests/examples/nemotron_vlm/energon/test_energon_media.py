# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sounds and clips in shards: files of all kinds, their rows, and those that are broken."""

import io
import json
import shlex
import sys
import wave
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data import make_source
from examples.mimo.nemotron_vlm.data.rows import COUNTED
from examples.mimo.nemotron_vlm.data.sample import IMAGES, SOUND
from examples.mimo.nemotron_vlm.data.sound_lengths import SAMPLING_RATE
from examples.mimo.nemotron_vlm.energon.__main__ import main
from examples.mimo.nemotron_vlm.energon.errors import BadClip, BadSound, MissingPackage
from examples.mimo.nemotron_vlm.energon.sounds import Listening
from examples.mimo.nemotron_vlm.energon.source import EnergonSource
from examples.mimo.nemotron_vlm.energon.videos import Extent, Watching
from examples.mimo.nemotron_vlm.model.presets import tiny_omni
from examples.mimo.nemotron_vlm.options.arguments import parse
from examples.mimo.nemotron_vlm.planner.inputs import plan_of
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    CLIPS,
    CRUDE,
    GRIDS,
    ShardReads,
    encoder,
    image,
    make_omni,
    make_shard,
    omni,
    source,
    survey,
)

ENTRY = tiny_omni().encoders[1]
LISTENING = Listening(ENTRY.subsampling_factor)
SAMPLES = 84


def tone(samples: int, rate: int = SAMPLING_RATE) -> np.ndarray:
    """A tone of 440 Hz at half of the full scale, float64 [samples]."""
    return np.sin(np.arange(samples) * (2 * np.pi * 440 / rate)) / 2


def wav(samples: np.ndarray, rate: int = SAMPLING_RATE, width: int = 2) -> bytes:
    """Return a file of samples from -1 to 1, [samples] or [samples, channels], of so many bytes."""
    whole = np.round(samples * (2 ** (8 * width - 1) - 1)).astype("<i8")
    whole += 128 * (width == 1)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(samples[0].size)
        writer.setsampwidth(width)
        writer.setframerate(rate)
        writer.writeframes(whole.reshape(-1, 1).view(np.uint8)[:, :width].tobytes())
    return file.getvalue()


def flac(samples: np.ndarray, rate: int = SAMPLING_RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="FLAC")
    return file.getvalue()


class TestSounds:
    @pytest.mark.parametrize(
        ("write", "rate", "channels", "near"),
        [
            *((wav, SAMPLING_RATE, channels, 2**-14) for channels in (1, 2, 6)),
            *((flac, SAMPLING_RATE, channels, 2**-14) for channels in (1, 2, 6)),
            *((partial(wav, width=n), SAMPLING_RATE, 1, 2.0 ** (2 - 8 * n)) for n in (1, 3)),
            (partial(wav, width=4), SAMPLING_RATE, 1, 1e-7),
            *((wav, rate, 1, 2e-3) for rate in (8000, 22050, 44100, 48000)),
        ],
    )
    def test_are_the_mean_of_their_channels_at_one_rate(self, write, rate, channels, near):
        scale = np.linspace(1, 0.5, channels)
        found = LISTENING.read(write(tone(rate // 4 + 1, rate)[:, None] * scale, rate))
        assert found.dtype == torch.float32
        assert len(found) == -(-(rate // 4 + 1) * SAMPLING_RATE // rate)
        # A filter of another rate sees nothing beyond the ends.
        inner = slice(200, -200) if rate != SAMPLING_RATE else slice(None)
        assert np.abs(found.numpy() - tone(len(found)) * scale.mean())[inner].max() < near

    def test_of_flac_that_are_damaged_are_refused(self):
        with pytest.raises(BadSound, match="^[^<]*$"):
            LISTENING.read(flac(tone(5000))[:40])


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Lines of text and tones: one, both or neither."""
    path = tmp_path_factory.mktemp("data") / "omni"
    make_omni(path, samples=96, seed=1)
    survey(path, makes=[omni])
    return path


class TestSamplesWithSound:
    def opened(self, path: Path, **options) -> EnergonSource:
        return source(path, encoder=omni(path / "tokenizer"), seq_length=64, **options)

    def test_have_the_rows_of_their_sounds_and_no_file_is_read_for_a_text(
        self, shards, monkeypatch
    ):
        opened, reads, counts = self.opened(shards), ShardReads(monkeypatch), set()
        for number in range(SAMPLES):
            ids = opened.text("train", number).input_ids
            assert not reads.images
            (sizes,) = opened.sizes("train", number, 1, SOUND)
            (images,) = opened.sizes("train", number, 1, IMAGES)
            assert (ids == opened.token_ids[SOUND]).sum() == ENTRY.rows(sizes).sum()
            counts.add((len(images), len(sizes)))
            heard = opened.inputs("train", number, SOUND)
            assert [len(sound) for sound in heard] == sizes.tolist()
            assert reads.images.total() == len(heard)  # no image
            reads.images.clear()
        assert counts == {(0, 0), (0, 1), (1, 0), (1, 1)}

    def test_are_what_the_planner_counts(self, shards):
        line = ["--data", f"energon:{shards}", "--tokenizer-model", str(shards / "tokenizer")]
        line += ["--model", "tiny-omni", "--dynamic-resolution", "--seq-length", "64"]
        options, opened = parse(line, 1), self.opened(shards, seed=1234)
        planned = plan_of(options)
        for inputs, layout in planned.encoders:
            each = inputs.encoder
            sizes = opened.sizes("train", 0, COUNTED, each.name)
            assert (
                inputs.mean(inputs.embeddings)
                == sum(each.rows(row).sum() for row in sizes) / COUNTED
            )
            kept = [each.kept(row, layout).sum() for row in sizes]
            assert inputs.most_kept(layout, 1, frozenset()) == pytest.approx(max(kept))
            assert max(kept) > 1.2 * np.mean(kept)  # rows differ
        with pytest.raises(UserError, match="99 images, .* sounds a row .* do not fit"):
            plan_of(parse([*line, "--plan-tiles", "99"], 1))

    def test_of_a_model_without_sound_are_left_out(self, shards):
        plain = encoder(shards / "tokenizer")
        survey(shards, makes=[lambda tokenizer: plain])
        left_out = source(shards, encoder=plain, bad_samples="skip").left_out("train")
        with_sound = sum(map(len, self.opened(shards).sizes("train", 0, SAMPLES, SOUND)))
        assert left_out["bad sound"] == with_sound
        with pytest.raises(ValueError, match="sound 1: the model has no encoder of sound"):
            source(shards, encoder=plain, bad_samples="refuse")

    def test_that_cannot_be_heard_are_counted_and_named(self, shards, tmp_path, capsys):
        whole = wav(tone(4000))
        files = [whole, whole[:3000], whole[:30], b"nothing", wav(tone(319)), b""]
        turns = [{"from": "human", "value": "hear"}, {"from": "gpt", "value": "low"}]
        talk = json.dumps({"conversations": turns}).encode()
        make_shard(tmp_path, [{"json": talk, "wav": file} for file in files], CRUDE)
        arguments = ["--tokenizer-model", str(shards / "tokenizer"), "--model", "tiny-omni"]
        assert main([str(tmp_path), *arguments]) == 0
        printed = capsys.readouterr().out
        assert "1 good, 0 of them text only" in printed and "sound   1" in printed
        assert "bad sound: 5" in printed and "a.tar/1: sound 1: " in printed
        assert "319 samples, of 16000 a second, are less than 320" in printed

    @pytest.mark.parametrize("package", ["soundfile", "soxr"])
    def test_need_packages(self, shards, tmp_path, monkeypatch, capsys, package):
        monkeypatch.delitem(sys.modules, package, raising=False)
        (tmp_path / f"{package}.py").write_text("raise ModuleNotFoundError")
        monkeypatch.syspath_prepend(tmp_path)
        talk = json.dumps({"caption": "low", "prompt": "hear"}).encode()
        make_shard(tmp_path, [{"json": talk, "wav": wav(tone(4000))}], CRUDE)
        arguments = ["--tokenizer-model", str(shards / "tokenizer"), "--model", "tiny-omni"]
        for workers in "01":
            assert main([str(tmp_path), *arguments, "--workers", workers]) == 2
            refused = capsys.readouterr().err.splitlines()[-1]
            assert refused == "error: sound needs soundfile, soxr: pip install '.[sound]'"


SHADES = [0, 60, 120, 180, 240]


def frames(width: int = 32, height: int = 24) -> list[Image.Image]:
    return [Image.new("RGB", (width, height), (shade,) * 3) for shade in SHADES]


def pngs() -> tuple[bytes, ...]:
    files = [io.BytesIO() for _ in SHADES]
    for file, frame in zip(files, frames(), strict=True):
        frame.save(file, "PNG")
    return tuple(file.getvalue() for file in files)


def mp4(**options: str) -> bytes:
    """The same frames, four a second."""
    av, file = pytest.importorskip("av"), io.BytesIO()
    with av.open(file, "w", format="mp4", options=options) as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        for frame in frames():
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return file.getvalue()


class TestClips:
    @pytest.mark.parametrize(
        ("wanted", "taken"),
        [
            ({}, [0, 1, 2, 3, 4]),
            ({"frames": 3}, [0, 1, 3]),
            ({"frames": 9}, [0, 1, 2, 3, 4]),
            ({"fps": 2.0}, [0, 2]),
        ],
    )
    @pytest.mark.parametrize("kind", ["images", "file", "file without a number of frames"])
    def test_have_the_frames_that_are_asked_for(self, kind, wanted, taken):
        in_pieces = {"movflags": "frag_keyframe+empty_moov"} if "without" in kind else {}
        files, fps = (pngs(), 4.0) if kind == "images" else ((mp4(**in_pieces),), 0.0)
        watching = Watching(CLIPS, **wanted)
        extent, frames = watching.frames_of(files, fps)
        found = [int(frame[12, 16].mean()) for frame in frames]
        assert found == pytest.approx([SHADES[number] for number in taken], abs=3)
        same, tubelets = watching.read(files, fps)
        assert extent == same == Extent(CLIPS.size_of(len(taken), 24, 32), 5, 4.0)
        assert len(tubelets) == len(watching.labels(extent)) == -(-len(taken) // CLIPS.tubelet)
        shades = torch.tensor([float(SHADES[number]) for number in taken])
        inner = tubelets[:, 1:3, 1:3].unflatten(-1, (CLIPS.tubelet, -1)).mean((1, 2, 4)).flatten()
        assert inner[: len(taken)].tolist() == pytest.approx(shades.tolist(), abs=3)

    @pytest.mark.parametrize(
        ("files", "text"),
        [
            ((image(32, 24), image(24, 32)), "2 of 2 frames, of 2 sizes"),
            ((image(32, 24), b"nothing"), "frame 2: damaged, or not what its name says"),
            ((b"\0\0\0\x20ftyp" + bytes(99),), "Invalid data found"),
        ],
    )
    def test_that_are_damaged_are_refused(self, files, text):
        if b"ftyp" in files[0]:
            pytest.importorskip("av")
        with pytest.raises(ValueError, match=text):
            Watching(CLIPS).read(files, 0.0)

    def test_of_unknown_speed_have_no_frames_in_a_second(self):
        with pytest.raises(BadClip, match='needs "fps" in its json'):
            Watching(CLIPS, fps=2.0).read(pngs(), 0.0)

    def test_of_other_frames_have_a_survey_of_their_own(self, shards, tmp_path):
        line = ["--data", f"energon:{shards}", "--tokenizer-model", str(shards / "tokenizer")]
        line += ["--model", "tiny-omni", "--dynamic-resolution", "--surveys", str(tmp_path)]
        found = []
        for frames in ("--video-target-num-patches 36", "--video-frames 2", "--video-fps 1"):
            options = parse([*line, *frames.split()], 1)
            with pytest.raises(UserError, match="no survey of train") as refusal:
                make_source(options.args, options.preset)
            assert main(shlex.split(str(refusal.value).partition("make one: ")[2])[3:]) == 0
            found.append(make_source(options.args, options.preset).fingerprint)
        assert len({source(shards, encoder=omni(shards / "tokenizer")).fingerprint, *found}) == 4

    def test_of_mp4_need_a_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "av", None)
        with pytest.raises(MissingPackage, match=r"^MP4 needs PyAV: pip install '.\[mp4\]'$"):
            Watching(CLIPS).read((b"\0\0\0\x20ftyp",), 0.0)


@pytest.mark.parametrize("kind", ["images", "file"])
def test_media_are_opened_once_and_stand_in_the_texts_order(shards, tmp_path, monkeypatch, kind):
    """An image between two clips, and a sound; text alone; and a clip with a damaged frame."""
    clip = {f"video1.{n}.png": file for n, file in enumerate(pngs())}
    other = {f"video2.{n}.png": file for n, file in enumerate(pngs()[:2])}
    first = clip if kind == "images" else {"video1.mp4": mp4()}
    both = {**first, **other, "png": image(32, 24), "wav": wav(tone(4000))}
    talks = ["copy <video> 3 <image> <video> <sound>", "copy", "copy <video>"]
    samples = [both, {}, clip | {"video1.3.png": b"nothing"}]
    for sample, question in zip(samples, talks, strict=True):
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "3"}]
        sample["json"] = json.dumps({"conversations": turns}).encode()
    make_shard(tmp_path, samples, CRUDE)
    tokenizer, calls = shards / "tokenizer", Counter()
    survey(tmp_path, tokenizer, splits=["train"], makes=[omni])
    opened = source(tmp_path, tokenizer, encoder=omni(tokenizer), seq_length=256)
    assert opened.left_out("train") == {"bad video": 1}
    numbers = {len(opened.sizes("train", n, 1, IMAGES)[0]): n for n in range(2)}
    counted = [(Image, "open"), (Image.Image, "convert"), (soundfile.SoundFile, "read")]
    if kind == "file":
        counted.append((pytest.importorskip("av"), "open"))
    for owner, name in counted:
        real = getattr(owner, name)

        def call(*given, real=real, name=f"{owner.__name__}.{name}", **options):
            calls[name] += 1
            return real(*given, **options)

        monkeypatch.setattr(owner, name, call)
    reads = ShardReads(monkeypatch)
    text = opened.text("train", numbers[3])
    assert not reads.images and not calls
    (heard,) = opened.inputs("train", numbers[3], SOUND)
    assert len(heard) == 4000 and calls == {"SoundFile.read": 1}
    inputs = opened.inputs("train", numbers[3], IMAGES)
    assert [each.ndim for each in inputs] == [4, 3, 4]
    images = 1 + 2 + (len(SHADES) if kind == "images" else 0)
    wanted = {"PIL.Image.open": images, "Image.convert": images, "SoundFile.read": 1}
    assert calls == wanted | ({"av.open": 1} if kind == "file" else {})
    sizes = np.array([GRIDS.size_of(24, 32), CLIPS.size_of(1, 24, 32)])
    image_rows, tubelet_rows = GRIDS.rows(sizes).tolist()
    assert image_rows != tubelet_rows
    runs = np.diff(np.flatnonzero(np.diff(np.pad(text.input_ids == opened.token_ids[IMAGES], 1))))[
        ::2
    ]
    assert runs.tolist() == [tubelet_rows] * 3 + [image_rows, tubelet_rows]
    *pictures, spectrum = opened.pictures("train", numbers[3])
    assert [picture.shape for picture in pictures] == [(3, 24, 32)] * (5 + 1 + 2)
    assert len(spectrum) == 3
