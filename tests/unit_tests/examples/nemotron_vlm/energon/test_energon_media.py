# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Images, clips and sounds are read as transformers reads them; the page what-is-read-how.md says
where they differ. Images become tiles as InternVL cuts them.

Pixels of images and clips are equal, bit by bit, and so are samples of sound: both sides call the
same libraries. That pixels are cut into their patches and tubelets is in test_media_grids.py.
Conversations have the ids that the processor of Nemotron 3 Nano Omni gives in transformers.
"""

import io
from functools import partial
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers import AutoTokenizer, ParakeetFeatureExtractor
from transformers.audio_utils import load_audio
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image
from transformers.models.nemotron_h_omni.processing_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3Processor,
)
from transformers.models.nemotron_h_omni.video_processing_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3VideoProcessor,
)
from transformers.processing_utils import ImagesKwargs
from transformers.video_utils import load_video

from examples.mimo.nemotron_vlm.energon.conversation import AROUND, Chat
from examples.mimo.nemotron_vlm.energon.encoding import Encoder, read_files
from examples.mimo.nemotron_vlm.energon.errors import BadMedium
from examples.mimo.nemotron_vlm.energon.images import Resizing, Tiling, open_image
from examples.mimo.nemotron_vlm.energon.records import MediaFile, Medium, read_record
from examples.mimo.nemotron_vlm.energon.videos import Extent, Watching
from examples.mimo.nemotron_vlm.model.names import IMAGES, SOUND
from examples.mimo.nemotron_vlm.model.presets import nano_omni_30b_a3b
from megatron.energon import CrudeSample
from tests.unit_tests.examples.nemotron_vlm.energon import digits_data, media_files
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import CLIPS, GRIDS, READER

TURNS = {"0": 0, "90": 3, "180": 2, "270": 1, "none": 0}
"""Quarters, counterclockwise, by which torchcodec turns a clip whose matrix turns clockwise."""


def check_image(path: Path, wanted: np.ndarray) -> None:
    """Check it whole, in a report and as a clip's frames, and that tiles are cut from it."""
    data = path.read_bytes()
    assert np.array_equal(np.array(open_image(data)[0]), wanted)
    pixels = torch.from_numpy(wanted).permute(2, 0, 1)
    (whole,) = READER.read([Medium(IMAGES, (data,))])
    assert whole.extent.size == GRIDS.size_of(*pixels.shape[1:])
    assert whole.made.equal(GRIDS.cut(pixels))
    tiling = Tiling(16)
    (tiles,) = Encoder(None, tiling).read([Medium(IMAGES, (data,))])
    assert tiles.made.equal(tiling.cut(Image.fromarray(wanted)))
    assert len(tiles.made) == tiling.size_of(*pixels.shape[:0:-1])
    for frame in READER.video.frames_of((data, data), 0.0)[1]:
        assert np.array_equal(frame, wanted)


def opaque(path: Path) -> None:
    check_image(path, np.array(load_image(str(path))))


def on_white(path: Path) -> None:
    """Check an image with hidden colours, which the processor does not show."""
    file = Image.open(path)
    wanted = convert_to_rgb(ImageOps.exif_transpose(file), return_numpy=True)
    assert (wanted != np.array(file.convert("RGB"))).any(), "hidden colours show elsewhere"
    check_image(path, wanted)


def scaled(path: Path) -> None:
    """Check greys as torchcodec reads paths for the processor; load_image clips at 255."""
    wanted = np.round(media_files.DEEP / 65535 * 255).astype(np.uint8)
    check_image(path, wanted[..., None].repeat(3, 2))


def clip(clockwise: str, path: Path) -> None:
    """Check frames; theirs is read by PyAV, whose frames torchcodec turns.

    The same frames as images, and in an MP4 file without a number of frames, are read alike.
    """
    data = path.read_bytes()
    for asked in ({}, {"num_frames": 3}, {"fps": 2}):
        theirs, metadata = load_video(str(path), backend="pyav", **asked)
        theirs = np.rot90(theirs, TURNS[clockwise], (1, 2))
        watching = Watching(CLIPS, asked.get("num_frames"), asked.get("fps"))
        extent, frames = watching.frames_of((data,), 0.0)
        assert np.array_equal(np.stack(frames), theirs)
        assert (extent.frames, extent.fps) == (metadata.total_num_frames, metadata.fps) == (5, 4.0)
        assert extent.size == CLIPS.size_of(len(theirs), *theirs.shape[1:3])
        tubelets = watching.cut(frames)
        assert tubelets.equal(CLIPS.cut(torch.from_numpy(theirs.copy()).permute(0, 3, 1, 2)))
        assert len(watching.labels(extent)) == len(tubelets)
        _, every = Watching(CLIPS).frames_of((data,), 0.0)
        images = tuple(media_files.saved(Image.fromarray(frame), "PNG") for frame in every)
        in_pieces = media_files.mp4(clockwise, movflags="frag_keyframe+empty_moov")
        for files, fps in ((images, 4.0), ((in_pieces,), 0.0)):
            again, others = watching.frames_of(files, fps)
            assert again == extent and np.array_equal(others, frames)


def heard(path: Path) -> None:
    """Check samples and features of a sound."""
    theirs = load_audio(str(path), sampling_rate=16000, backend="soundfile")
    (found,) = READER.read([Medium(SOUND, (path.read_bytes(),))])
    assert np.array_equal(found.made.numpy(), theirs)
    published = nano_omni_30b_a3b().with_images_of_any_size().encoders[1]
    extractor = ParakeetFeatureExtractor(published.num_mel_bins, 16000)
    wanted = extractor([theirs], sampling_rate=16000).input_features[0]
    assert published.log_mel(found.made).equal(torch.as_tensor(wanted))


FILES = {
    **{name: (opaque, data) for name, data in media_files.OPAQUE.items()},
    **{name: (on_white, data) for name, data in media_files.TRANSPARENT.items()},
    **{
        f"{kind} of 16 bits": (scaled, media_files.saved(Image.fromarray(media_files.DEEP), kind))
        for kind in ("PNG", "TIFF", "PPM", "JPEG2000")
    },
    **{f"MP4 turned {turn}": (partial(clip, turn), media_files.mp4(turn)) for turn in TURNS},
    **{name: (heard, data) for name, data in media_files.SOUNDS.items()},
}
assert len(FILES) >= 100


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_transformers_reads(name, tmp_path):
    check, data = FILES[name]
    path = tmp_path / "file.wav"
    path.write_bytes(data)
    check(path)


def test_a_clip_has_all_frames_that_are_shown_whatever_its_header_counts():
    """The clip was cut from a longer one, or its header counts the first fragment alone."""
    _, every = READER.video.frames_of((media_files.mp4(),), 0.0)
    in_pieces = media_files.mp4(frag_duration="400000")
    for data, counted, shown in (
        (media_files.cut(media_files.mp4(), 2), 5, 3),
        (in_pieces, 2, 5),
    ):
        with av.open(io.BytesIO(data)) as container:
            assert container.streams.video[0].frames == counted
        extent, frames = READER.video.frames_of((data,), 0.0)
        assert extent.frames == shown and np.array_equal(frames, every[-shown:])


def test_a_clip_that_ends_between_two_frames_is_damaged():
    data = media_files.mp4(moov_size="5000")  # the header comes first
    with av.open(io.BytesIO(data)) as container:
        end = [packet.pos for packet in container.demux(video=0) if packet.size][-1]
    with pytest.raises(BadMedium, match="4 of 5 frames"):
        READER.video.frames_of((data[:end],), 0.0)


def test_a_damaged_jpeg_is_refused_alike_if_it_is_only_measured():
    """A survey decodes JPEG to an eighth of its size; other files are decoded as for a training."""
    draw, outcomes = np.random.default_rng(1), set()
    for whole in (data for name, data in media_files.OPAQUE.items() if name.startswith("JPEG")):
        for place in draw.integers(len(whole), size=40):
            data = whole[:place] + draw.bytes(8) + whole[place + 8 :]
            read, measured = (verdict(data, is_whole) for is_whole in (True, False))
            assert read == measured
            outcomes.add(type(read))
    assert outcomes == {str, Extent}


def verdict(data: bytes, is_whole: bool) -> Extent | str:
    try:
        return READER.read([Medium(IMAGES, (data,))], is_whole)[0].extent
    except BadMedium as error:
        return str(error)


def test_greys_of_16_bits_may_be_transparent_and_turned():
    deep = Image.fromarray(np.array([[0, 300, 600]], np.uint16))
    found, _ = open_image(media_files.oriented("PNG", 6, deep, transparency=300))
    assert np.array(found)[..., 0].tolist() == [[0], [255], [2]]


def published_grid(width: int, height: int, tile: int, most: int) -> tuple[int, int]:
    """InternVL's own loops (find_closest_aspect_ratio), over all grids."""
    grids = [(i, j) for i in range(1, most + 1) for j in range(1, most + 1) if i * j <= most]
    best_difference, best = float("inf"), (1, 1)
    for grid in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(width / height - grid[0] / grid[1])
        if difference < best_difference:
            best_difference, best = difference, grid
        elif difference == best_difference and width * height > 0.5 * tile**2 * grid[0] * grid[1]:
            best = grid
    return best


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([16, 448]), st.integers(1, 12))
def test_tiles_lie_in_the_published_grid(width, height, tile, most):
    """They differ only for two ratios equally far with as many tiles: any order is right."""
    tiling = Tiling(tile, most)
    grids = tiling.grid(width, height), published_grid(width, height, tile, most)
    assert len({abs(width / height - columns / rows) for columns, rows in grids}) == 1
    (count,) = {columns * rows for columns, rows in grids}
    assert tiling.size_of(width, height) == count + (count > 1)
    assert Tiling(tile, most, thumbnail=False).size_of(width, height) == count


def test_tiles_come_row_by_row_and_the_thumbnail_last():
    """Figure 4 of the InternVL 1.5 paper has 2 × 3 tiles."""
    assert Tiling(448).grid(800, 1300) == (2, 3)
    image = Image.new("RGB", (48, 32))
    for place in range(6):
        left, top = 16 * (place % 3), 16 * (place // 3)
        image.paste((40 * place, 7, 200), (left, top, left + 16, top + 16))
    tiles = Tiling(16, max_tiles=6).cut(image)
    assert tiles.shape == (7, 3, 16, 16) and tiles.dtype == torch.uint8
    for place in range(6):
        assert tiles[place, 0].unique().tolist() == [40 * place]
    assert tiles[6, 0, 0, 0] < tiles[6, 0, 15, 15]
    assert (tiles[:, 1] == 7).all() and (tiles[:, 2] == 200).all()
    with pytest.raises(ValueError, match="0 tiles"):
        Tiling(16, max_tiles=0)


TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for item in message.content %}
{%- if item.type == 'text' %}{{ item.text }}{% endif %}
{%- if item.type == 'video' %}<video>{% endif %}
{%- if item.type == 'image' %}<image>
{% endif %}{% if item.type == 'audio' %}<so_embedding>{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}"""
SPECIAL = ["<image>", "<so_embedding>", *(token for pair in AROUND.values() for token in pair)]
ITEMS = [
    {"type": "text", "text": " Is this "},
    {"type": "image"},
    {"type": "text", "text": "louder than  that? \n"},
    {"type": "audio"},
    {"type": "image"},
]
THANKS = [{"type": "text", "text": "So?"}, {"type": "audio"}]
CLIP = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "Whither? "}]
TALKS = {
    "items": [("user", ITEMS), ("assistant", " No. "), ("user", THANKS), ("assistant", "b")],
    "clip": [("user", CLIP), ("assistant", "Up.")],
    "text": [("system", "B  b."), ("user", "<image>: <so_embedding>?"), ("assistant", "Yes.")],
}
SHAPES = [(33, 20), (60, 8)]
SOUNDS = [np.sin(np.arange(samples) / 9) for samples in (4000, 12801)]
FRAMES = 5


class Grids:
    """Stands in for the image processor, which needs torchvision: its grids alone."""

    downsample_ratio = 1 / GRIDS.pixel_shuffle
    model_input_names = ["image_grid_hw"]
    valid_kwargs = ImagesKwargs

    def __call__(self, images, **_):
        shapes = [GRIDS.grid_of(each.height, each.width) for each in images]
        return {"image_grid_hw": torch.tensor(shapes)}

    def fetch_images(self, images):
        return images


@pytest.mark.parametrize(
    ("name", "fps"), [*((name, 0) for name in TALKS), ("clip", 2), ("clip", 6.3)]
)
def test_ids_are_the_released_processors(tmp_path, monkeypatch, name, fps):
    texts = str(TALKS[name])
    shapes = SHAPES[: texts.count("image")]
    sounds = SOUNDS[: texts.count("audio") + texts.count("<so_")]
    frames = FRAMES * (name == "clip")
    messages = [{"role": role, "content": content} for role, content in TALKS[name]]

    made = AutoTokenizer.from_pretrained(digits_data.byte_tokenizer(tmp_path, TEMPLATE, SPECIAL))
    released = NemotronH_Omni_Reasoning_V3Processor
    monkeypatch.setattr(released, "check_argument_for_proper_class", lambda *_: None)
    clips = NemotronH_Omni_Reasoning_V3VideoProcessor(
        patch_size=CLIPS.patch,
        temporal_patch_size=CLIPS.tubelet,
        video_target_num_patches=CLIPS.patches,
        norm_mean=[0.0] * 3,
        norm_std=[1.0] * 3,
    )
    processor = released(Grids(), clips, made, ParakeetFeatureExtractor(16, 16000))
    text = processor.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False)
    pixels = [Image.new("RGB", shape) for shape in shapes]
    videos = [np.zeros((FRAMES, 24, 32, 3), np.uint8)] if frames else None
    metadata = [{"total_num_frames": FRAMES, "fps": fps or None}]
    asked = {"num_frames": 3, "do_sample_frames": True, "video_metadata": metadata}
    made = processor(pixels, text, videos, sounds or None, videos_kwargs=asked)
    wanted = made["input_ids"][0]

    files = {f"{n}.png": digits_data.image(*shape) for n, shape in enumerate(shapes)}
    files |= {f"{n}.wav": media_files.sound(samples) for n, samples in enumerate(sounds)}
    files |= {f"video.{n}.png": digits_data.image(32, 24) for n in range(frames)}
    for message in messages:
        if isinstance(message["content"], str):  # our placeholder of a sound
            message["content"] = message["content"].replace("<so_embedding>", "<sound>")
    named = {name: MediaFile(name) for name in files}
    named["json"] = {"messages": messages, "fps": fps}
    record = read_record(CrudeSample(named), "")
    more = {"subsampling": READER.subsampling, "video": Watching(CLIPS, frames=3)}
    encoder = Encoder(Chat(tmp_path, sound=True), Resizing(GRIDS), **more)
    media = encoder.read(read_files(files, record.media))
    found = encoder.text(record, [each.extent for each in media])
    assert [*found.input_ids.tolist(), int(found.labels[-1])] == wanted
