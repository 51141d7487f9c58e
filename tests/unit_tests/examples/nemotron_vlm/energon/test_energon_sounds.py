# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Sounds in shards: files of all kinds, their rows, and those that are broken."""

import io
import json
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import ParakeetFeatureExtractor

from examples.mimo.nemotron_vlm.data.clips import SAMPLING_RATE
from examples.mimo.nemotron_vlm.data.sample import IMAGES, SOUND
from examples.mimo.nemotron_vlm.energon.__main__ import main
from examples.mimo.nemotron_vlm.energon.errors import BadSound
from examples.mimo.nemotron_vlm.energon.sounds import Listening
from examples.mimo.nemotron_vlm.energon.source import EnergonSource
from examples.mimo.nemotron_vlm.model.presets import tiny_omni
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    CRUDE,
    ShardReads,
    encoder,
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
    pytest.importorskip("soundfile").write(file, samples, rate, format="FLAC")
    return file.getvalue()


class TestFiles:
    @pytest.mark.parametrize("write", [wav, flac])
    @pytest.mark.parametrize("channels", [1, 2, 6])
    def test_are_the_mean_of_their_channels(self, write, channels):
        samples = tone(1000)[:, None] * np.linspace(1, 0.5, channels)
        found = LISTENING.cut(write(samples))
        assert found.dtype == torch.float32
        assert np.abs(found.numpy() - samples.mean(1)).max() < 2**-14

    @pytest.mark.parametrize("width", [1, 2, 3, 4])
    def test_of_any_width_have_the_same_scale(self, width):
        found = LISTENING.cut(wav(tone(1000), width=width)).numpy()
        assert np.abs(found - tone(1000)).max() < max(2.0 ** (2 - 8 * width), 1e-7)

    @pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
    def test_of_another_rate_are_resampled(self, rate):
        file = wav(tone(rate // 4 + 1, rate), rate)
        found = LISTENING.cut(file).numpy()
        assert len(found) == LISTENING.size_of(file) == -(-(rate // 4 + 1) * SAMPLING_RATE // rate)
        inner = slice(200, -200)  # the filter sees nothing beyond the ends
        assert np.abs(found - tone(len(found)))[inner].max() < 2e-3


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Lines of text and tones: one, both or neither."""
    path = tmp_path_factory.mktemp("data") / "omni"
    make_omni(path, samples=96, seed=1)
    survey(path, makes=[omni])
    return path

    def test_of_flac_that_are_damaged_are_refused(self):
        with pytest.raises(BadSound, match="^[^<]*$"):
            LISTENING.cut(flac(tone(5000))[:40])


class TestSamples:
    def opened(self, path: Path, **options) -> EnergonSource:
        return source(path, encoder=omni(path / "tokenizer"), seq_length=64, **options)

    def test_have_the_rows_of_their_clips_and_no_file_is_read_for_a_text(self, shards, monkeypatch):
        opened, reads, counts = self.opened(shards), ShardReads(monkeypatch), set()
        for number in range(SAMPLES):
            ids = opened.text("train", number).input_ids
            assert not reads.images
            (sizes,) = opened.sizes("train", number, 1, SOUND)
            (images,) = opened.sizes("train", number, 1, IMAGES)
            assert (ids == opened.token_ids[SOUND]).sum() == ENTRY.rows(sizes).sum()
            counts.add((len(images), len(sizes)))
            clips = opened.inputs("train", number, SOUND)
            assert [len(clip) for clip in clips] == sizes.tolist()
            assert reads.images.total() == len(clips)  # no image
            reads.images.clear()
        assert counts == {(0, 0), (0, 1), (1, 0), (1, 1)}
        assert opened.inputs_per_sample(SOUND) == pytest.approx(
            sum(len(each) for each in opened.sizes("train", 0, SAMPLES, SOUND)) / SAMPLES
        )

    def test_have_the_frames_of_the_released_extractor(self, shards):
        opened = self.opened(shards)
        extract = ParakeetFeatureExtractor(ENTRY.num_mel_bins, SAMPLING_RATE)
        for number in range(20):
            for clip in opened.inputs("train", number, SOUND):
                wanted = extract(clip.numpy(), sampling_rate=SAMPLING_RATE)
                frames = ENTRY.collate([[clip]])["frames"]
                assert torch.equal(frames, torch.as_tensor(wanted.input_features[0]))
                assert len(frames) // ENTRY.subsampling_factor + 1 >= ENTRY.rows(len(clip))

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
        arguments = [str(tmp_path), "--tokenizer", str(shards / "tokenizer"), "--sound"]
        assert main([*arguments, "--tile", "16", "--tokens-per-tile", "4"]) == 0
        printed = capsys.readouterr().out
        assert "1 good, 0 of them text only" in printed and "sound   1" in printed
        assert "bad sound: 5" in printed and "a.tar/1: sound 1: " in printed
        assert "319 samples, of 16000 a second, are less than 320" in printed

    def test_of_flac_need_a_package(self, shards, tmp_path, monkeypatch, capsys):
        monkeypatch.delitem(sys.modules, "soundfile", raising=False)
        (tmp_path / "soundfile.py").write_text("raise ModuleNotFoundError")
        monkeypatch.syspath_prepend(tmp_path)
        talk = json.dumps({"caption": "low", "prompt": "hear"}).encode()
        make_shard(tmp_path, [{"json": talk, "flac": b"fLaC"}], CRUDE)
        arguments = [str(tmp_path), "--tokenizer", str(shards / "tokenizer"), "--sound"]
        sizes = ["--tile", "16", "--tokens-per-tile", "4", "--workers"]
        for workers in "01":
            assert main([*arguments, *sizes, workers]) == 2
            refused = capsys.readouterr().err.splitlines()[-1]
            assert refused == "error: FLAC needs soundfile: pip install '.[flac]'"
