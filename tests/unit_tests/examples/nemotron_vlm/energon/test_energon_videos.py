# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Clips in shards: numbered images and files, their frames, and those that are broken."""

import io
import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from examples.mimo.nemotron_vlm.data.sample import IMAGES
from examples.mimo.nemotron_vlm.energon.errors import BadClip, MissingPackage
from examples.mimo.nemotron_vlm.energon.videos import Extent, Watching
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    CLIPS,
    CRUDE,
    GRIDS,
    ShardReads,
    image,
    make_omni,
    make_shard,
    omni,
    source,
    survey,
)

SHADES = [0, 60, 120, 180, 240]


def frames(width: int = 32, height: int = 24) -> list[Image.Image]:
    return [Image.new("RGB", (width, height), (shade,) * 3) for shade in SHADES]


def pngs() -> tuple[bytes, ...]:
    files = [io.BytesIO() for _ in SHADES]
    for file, frame in zip(files, frames(), strict=True):
        frame.save(file, "PNG")
    return tuple(file.getvalue() for file in files)


def mp4() -> bytes:
    """The same frames, four a second."""
    av, file = pytest.importorskip("av"), io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
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
    @pytest.mark.parametrize("kind", ["images", "file"])
    def test_have_the_frames_that_are_asked_for(self, kind, wanted, taken):
        files, fps = (pngs(), 4.0) if kind == "images" else ((mp4(),), 0.0)
        watching = Watching(CLIPS, **wanted)
        found = [int(frame[12, 16].mean()) for frame in watching.frames_of(files, fps)]
        assert found == pytest.approx([SHADES[number] for number in taken], abs=3)
        extent = watching.extent_of(files, fps)
        assert extent == Extent(CLIPS.size_of(len(taken), 24, 32), 5, 4.0)
        tubelets = watching.cut(files, fps)
        assert len(tubelets) == len(watching.labels(extent)) == -(-len(taken) // CLIPS.tubelet)
        shades = torch.tensor([float(SHADES[number]) for number in taken])
        inner = tubelets[:, 1:3, 1:3].unflatten(-1, (CLIPS.tubelet, -1)).mean((1, 2, 4)).flatten()
        assert inner[: len(taken)].tolist() == pytest.approx(shades.tolist(), abs=3)

    @pytest.mark.parametrize(
        ("files", "text"),
        [
            ((image(32, 24), image(24, 32)), "2 of 2 frames, of 2 sizes"),
            ((image(32, 24), b"nothing"), "frame 2: neither of JPEG, PNG"),
            ((b"\0\0\0\x20ftyp" + bytes(99),), "Invalid data found"),
        ],
    )
    def test_that_are_damaged_are_refused(self, files, text):
        if b"ftyp" in files[0]:
            pytest.importorskip("av")
        with pytest.raises(ValueError, match=text):
            Watching(CLIPS).cut(files, 0.0)

    def test_of_unknown_speed_have_no_frames_in_a_second(self):
        with pytest.raises(BadClip, match='needs "fps" in its json'):
            Watching(CLIPS, fps=2.0).extent_of(pngs(), 0.0)

    def test_of_mp4_need_a_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "av", None)
        with pytest.raises(MissingPackage, match=r"^MP4 needs PyAV: pip install '.\[mp4\]'$"):
            Watching(CLIPS).cut((b"\0\0\0\x20ftyp",), 0.0)


def test_clips_and_images_are_inputs_of_one_encoder_in_the_texts_order(tmp_path, monkeypatch):
    """An image between two clips, text alone, and a clip of which a frame is damaged."""
    clip = {f"video.{n}.png": file for n, file in enumerate(pngs())}
    other = {f"video2.{n}.png": file for n, file in enumerate(pngs()[:2])}
    talks = ["copy <video> 3 <image> <video>", "copy", "copy <video>"]
    samples = [{**clip, **other, "png": image(32, 24)}, {}, clip | {"video.3.png": b"nothing"}]
    for sample, question in zip(samples, talks, strict=True):
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "3"}]
        sample["json"] = json.dumps({"conversations": turns}).encode()
    make_shard(tmp_path, samples, CRUDE)
    make_omni(tmp_path / "omni", samples=8, seed=3)
    tokenizer = tmp_path / "omni" / "tokenizer"
    survey(tmp_path, tokenizer, splits=["train"], makes=[omni])
    opened = source(tmp_path, tokenizer, encoder=omni(tokenizer), seq_length=128)
    assert opened.left_out("train") == {"bad video": 1}
    reads = ShardReads(monkeypatch)
    numbers = {len(opened.sizes("train", n, 1, IMAGES)[0]): n for n in range(2)}
    text = opened.text("train", numbers[3])
    assert not reads.images
    inputs = opened.inputs("train", numbers[3], IMAGES)
    assert [each.ndim for each in inputs] == [4, 3, 4]
    sizes = np.array([GRIDS.size_of(24, 32), CLIPS.size_of(1, 24, 32)])
    image_rows, tubelet_rows = GRIDS.rows(sizes).tolist()
    assert image_rows != tubelet_rows
    runs = np.diff(np.flatnonzero(np.diff(np.pad(text.input_ids == opened.image_token, 1))))[::2]
    assert runs.tolist() == [tubelet_rows] * 3 + [image_rows, tubelet_rows]
    pictures = opened.pictures("train", numbers[3])
    assert [picture.shape for picture in pictures] == [(3, 24, 32)] * (5 + 1 + 2)
    assert opened.inputs_per_sample(IMAGES) == 1.5
