# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Images, clips and sounds are read as transformers reads them; the page what-is-read-how.md says
where they differ.

Pixels of images are equal, bit by bit, and so are samples of sound: both sides call the same
libraries. Patches and tubelets may differ by one rounding of fp32, as theirs divide by 255 first.
"""

import io
import struct
from itertools import product

import av
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image, ImageOps
from transformers import ParakeetFeatureExtractor
from transformers.audio_utils import load_audio
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image
from transformers.models.nemotron_h_omni.video_processing_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3VideoProcessor,
)
from transformers.video_utils import load_video

from examples.mimo.nemotron_vlm.data.sample import IMAGES, SOUND
from examples.mimo.nemotron_vlm.energon.conversation import VIDEO
from examples.mimo.nemotron_vlm.energon.encoding import Encoder, File
from examples.mimo.nemotron_vlm.energon.errors import BadClip, BadImage, BadSound
from examples.mimo.nemotron_vlm.energon.images import Resizing, Tiling, open_image
from examples.mimo.nemotron_vlm.energon.sounds import Listening
from examples.mimo.nemotron_vlm.energon.videos import Watching
from examples.mimo.nemotron_vlm.model.presets import nano_omni_30b_a3b, tiny_omni
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import CLIPS, GRIDS

WIDTH, HEIGHT = 40, 24
LISTENING = Listening(tiny_omni().encoders[1].subsampling_factor)
READER = Encoder(None, Resizing(GRIDS), 1, sound=LISTENING, video=Watching(CLIPS))
"""Reads media; it has no tokenizer, which texts alone need."""
TURNS = {"0": 0, "90": 3, "180": 2, "270": 1}
"""Quarters, counterclockwise, by which torchcodec turns a clip whose matrix turns clockwise."""


def colours(mode: str = "RGB") -> Image.Image:
    """A picture whose corners differ, hidden colours included."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    channels = [x * 255 // WIDTH, y * 255 // HEIGHT, 255 - x * 6, (x * y) % 256]
    shown = Image.fromarray(np.stack(channels, -1).astype(np.uint8), "RGBA")
    return shown if mode == "RGBA" else shown.convert("LA" if mode == "LA" else "RGB").convert(mode)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def oriented(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(colours(), kind, exif=exif)


def palette(kind: str, **options) -> bytes:
    return saved(colours().quantize(16), kind, **options)


TURNED = "JPEG", "PNG", "WEBP", "TIFF"
OPAQUE = {
    **{f"{k} EXIF {n}": oriented(k, n) for k, n in product(TURNED, range(1, 9))},
    **{f"PNG {mode}": saved(colours(mode), "PNG") for mode in ("1", "L", "RGB", "P")},
    **{f"JPEG {mode}": saved(colours(mode), "JPEG") for mode in ("L", "RGB", "CMYK")},
    **{f"TIFF {mode}": saved(colours(mode), "TIFF") for mode in ("1", "L", "CMYK", "LAB", "YCbCr")},
    **{k: saved(colours(), k) for k in ("BMP", "GIF", "PPM", "ICO", "TGA", "JPEG2000")},
    "animated GIF": saved(colours(), "GIF", save_all=True, append_images=[colours("L")]),
    "animated WEBP": saved(colours(), "WEBP", save_all=True, append_images=[colours("L")]),
    "two pages": saved(colours(), "TIFF", save_all=True, append_images=[colours("L")]),
    "APNG": saved(colours(), "PNG", save_all=True, append_images=[ImageOps.flip(colours())]),
}
TRANSPARENT = {
    **{f"PNG {mode}": saved(colours(mode), "PNG") for mode in ("RGBA", "LA")},
    **{f"{kind} RGBA": saved(colours("RGBA"), kind) for kind in ("WEBP", "TIFF", "TGA", "ICO")},
    "lossless WEBP": saved(colours("RGBA"), "WEBP", lossless=True),
    "TIFF LA": saved(colours("LA"), "TIFF"),
    "palette with a transparent colour": palette("PNG", transparency=3),
    "palette with transparencies": palette("PNG", transparency=bytes(range(0, 160, 10))),
    "GIF with a transparent colour": palette("GIF", transparency=3),
    "RGB with a transparent colour": saved(colours(), "PNG", transparency=(0, 0, 255)),
    "grey with a transparent colour": saved(colours("L"), "PNG", transparency=100),
}


class TestImages:
    @pytest.mark.parametrize("name", OPAQUE)
    def test_have_the_pixels_of_load_image(self, tmp_path, name):
        path = tmp_path / "image"
        path.write_bytes(OPAQUE[name])
        self.check(OPAQUE[name], np.array(load_image(str(path))))

    @pytest.mark.parametrize("name", TRANSPARENT)
    def test_are_on_white_as_the_processor_puts_them(self, name):
        file = Image.open(io.BytesIO(TRANSPARENT[name]))
        wanted = convert_to_rgb(ImageOps.exif_transpose(file), return_numpy=True)
        assert (wanted != np.array(file.convert("RGB"))).any(), "hidden colours show elsewhere"
        self.check(TRANSPARENT[name], wanted)

    def check(self, data: bytes, wanted: np.ndarray) -> None:
        """Whole, in a report and as a clip's frames; tiles are cut from the same image."""
        assert np.array_equal(np.array(open_image(data)), wanted)
        pixels = torch.from_numpy(wanted).permute(2, 0, 1)
        (whole,) = READER.read([File(IMAGES, (data,))])
        assert whole.extent.size == GRIDS.size_of(*pixels.shape[1:])
        assert whole.made.equal(GRIDS.cut(pixels))
        tiling = Tiling(16)
        (tiles,) = Encoder(None, tiling, 4).read([File(IMAGES, (data,))])
        assert tiles.made.equal(tiling.cut(Image.fromarray(wanted)))
        assert len(tiles.made) == tiling.size_of(*pixels.shape[:0:-1])
        assert READER.pictures([File(IMAGES, (data,))])[0].equal(pixels)
        for frame in READER.pictures([File(VIDEO, (data, data))]):
            assert frame.equal(pixels)

    @pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "JPEG2000"])
    def test_in_greys_of_16_bits_are_scaled(self, kind):
        """As torchcodec's, by which the processor reads paths; load_image clips at 255."""
        deep = np.arange(WIDTH * HEIGHT, dtype=np.uint16).reshape(HEIGHT, WIDTH) * 68
        found = np.array(open_image(saved(Image.fromarray(deep), kind)))
        wanted = np.round(deep / 65535 * 255).astype(np.uint8)
        assert wanted.max() == 254 and np.array_equal(found, wanted[..., None].repeat(3, 2))

    def test_in_greys_of_16_bits_may_be_transparent_or_turned(self):
        deep = Image.fromarray(np.array([[0, 300, 600]], np.uint16))
        exif = Image.Exif()
        exif[0x0112] = 6
        found = open_image(saved(deep, "PNG", transparency=300, exif=exif))
        assert np.array(found)[..., 0].tolist() == [[0], [255], [2]]

    @pytest.mark.parametrize(
        ("data", "why"),
        [
            (saved(Image.new("I", (4, 4), 70000), "TIFF"), "mode I: convert its greys of 32 bits"),
            (saved(Image.new("F", (4, 4), 0.5), "TIFF"), "mode F: convert its greys of 32 bits"),
            (saved(Image.new("1", (20000, 5000)), "PNG"), "exceeds limit of 89478485 pixels"),
            (saved(Image.new("1", (20000, 10000)), "PNG"), "exceeds limit of 178956970 pixels"),
            (saved(colours(), "JPEG")[:-50], "truncated"),
            (b"", "Pillow finds no image"),
        ],
    )
    def test_that_cannot_be_shown_are_refused_by_name(self, data, why):
        with pytest.raises(BadImage, match=f"image 1: .*{why}"):
            READER.read([File(IMAGES, (data,))])

    def test_without_area_are_refused_by_name(self, monkeypatch):
        monkeypatch.setattr(Image, "open", lambda *_, **__: Image.new("RGB", (0, 7)))
        with pytest.raises(BadImage, match="image 1: 0 × 7 pixels"):
            READER.read([File(IMAGES, (b"",))])


def mp4(clockwise: str = "0", frames: int = 5, size: tuple[int, int] = (64, 48)) -> bytes:
    """An MP4 file of colours, with the matrix of a camera that was held upright or turned."""
    file = io.BytesIO()
    y, x = np.mgrid[: size[1], : size[0]]
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=4, options={"crf": "5"})
        (stream.width, stream.height), stream.pix_fmt = size, "yuv420p"
        for number in range(frames):
            pixels = np.stack([x * 255 // size[0], y * 255 // size[1], 0 * x + 40 * number], -1)
            frame = av.VideoFrame.from_ndarray(pixels.astype(np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    turns = {"0": (1, 0), "90": (0, 1), "180": (-1, 0), "270": (0, -1), "none": (0, 0)}
    cos, sin = turns[clockwise]
    data, one = file.getvalue(), 1 << 16
    matrices = [
        struct.pack(">9i", *(one * value for value in four), 0, 0, 1 << 30)
        for four in ((1, 0, 0, 0, 1, 0), (cos, sin, 0, -sin, cos, 0))
    ]
    head = data.index(b"tkhd")  # the matrix of the movie comes before
    return data[:head] + data[head:].replace(*matrices, 1)


class TestClips:
    @pytest.mark.parametrize("clockwise", TURNS)
    @pytest.mark.parametrize("options", [{}, {"num_frames": 3}, {"fps": 2}])
    def test_of_mp4_have_the_frames_of_load_video_upright(self, tmp_path, clockwise, options):
        """Theirs is read by PyAV here, whose frames torchcodec has, too, but turned."""
        path = tmp_path / "clip.mp4"
        path.write_bytes(mp4(clockwise))
        theirs, metadata = load_video(str(path), backend="pyav", **options)
        theirs = np.rot90(theirs, TURNS[clockwise], (1, 2))
        watching = Watching(CLIPS, options.get("num_frames"), options.get("fps"))
        extent, frames = watching.frames_of((mp4(clockwise),), 0.0)
        assert np.array_equal(np.stack(frames), theirs)
        assert extent.frames == metadata.total_num_frames and extent.fps == metadata.fps
        assert extent.size == CLIPS.size_of(len(theirs), *theirs.shape[1:3])
        processor = NemotronH_Omni_Reasoning_V3VideoProcessor(
            norm_mean=[0.0] * 3,
            norm_std=[1.0] * 3,
            patch_size=CLIPS.patch,
            video_target_num_patches=CLIPS.patches,
            temporal_patch_size=CLIPS.tubelet,
        )
        pixels = torch.from_numpy(theirs.copy()).permute(0, 3, 1, 2)
        (wanted,) = processor._preprocess([pixels])["pixel_values_videos"]
        _, found = watching.read((mp4(clockwise),), 0.0)
        tubelets, rows, columns, _ = found.shape
        patches = found.view(tubelets, rows, columns, -1, CLIPS.patch, CLIPS.patch)
        patches = patches.permute(0, 3, 1, 4, 2, 5).reshape(wanted.shape) / 255
        assert (patches - wanted).abs().max() < 1e-6

    def test_with_a_matrix_of_zeros_stay_as_they_are(self):
        (shape,) = {frame.shape for frame in Watching(CLIPS).frames_of((mp4("none"),), 0.0)[1]}
        assert shape == (48, 64, 3)

    def test_without_video_are_refused_by_name(self):
        file = io.BytesIO()
        with av.open(file, "w", format="mp4") as container:
            stream = container.add_stream("aac", rate=16000)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate = 16000
            container.mux(stream.encode(frame))
            container.mux(stream.encode())
        with pytest.raises(BadClip, match="video 1: an MP4 file without video"):
            READER.read([File(VIDEO, (file.getvalue(),))])


RATES = (8000, 11025, 16000, 22050, 32000, 44100, 48000)
DEPTHS = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")


def noise(rate: int = 16000, channels: int = 1, kind: str = "WAV", depth: str = "PCM_16") -> bytes:
    """A file of a quarter of a second, to which all frequencies belong."""
    samples = np.random.default_rng(rate).standard_normal((rate // 4 + 1, channels)) / 10
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=depth)
    return file.getvalue()


SOUNDS = [
    *product(RATES, (1, 2), ("WAV", "FLAC"), ["PCM_16"]),
    *((16000, 1, "WAV", depth) for depth in DEPTHS),
    (44100, 6, "WAVEX", "PCM_24"),
    (22050, 2, "FLAC", "PCM_24"),
    (8000, 1, "WAV", "ULAW"),
]


class TestSounds:
    @pytest.mark.parametrize(("rate", "channels", "kind", "depth"), SOUNDS)
    def test_have_the_samples_and_features_of_theirs(self, tmp_path, rate, channels, kind, depth):
        path = tmp_path / "sound.wav"
        path.write_bytes(noise(rate, channels, kind, depth))
        theirs = load_audio(str(path), sampling_rate=16000, backend="soundfile")
        (heard,) = READER.read([File(SOUND, (path.read_bytes(),))])
        assert np.array_equal(heard.made.numpy(), theirs)
        published = nano_omni_30b_a3b().with_images_of_any_size().encoders[1]
        extractor = ParakeetFeatureExtractor(published.num_mel_bins, 16000)
        wanted = extractor([theirs], sampling_rate=16000).input_features[0]
        assert published.log_mel(heard.made).equal(torch.as_tensor(wanted))

    @pytest.mark.parametrize(
        ("samples", "rate", "why"),
        [
            (np.zeros(0), 16000, "0 samples, of 16000 a second, are less than 320"),
            (np.append(np.zeros(999), np.nan), 16000, "a sample of nan"),
            (np.append(np.zeros(999), -np.inf), 16000, "a sample of inf"),
            (np.append(np.zeros(999), 1e300), 16000, "a sample of inf"),  # as fp32
            (np.append(np.zeros(999), 32767), 16000, "a sample of 32767"),
            (np.append(np.zeros(999), -17), 44100, "a sample of 17: .* -1 to 1, 16 at most"),
            (np.zeros(999), 7, "7 samples a second; from 1000 to 1000000 are read"),
        ],
    )
    @pytest.mark.parametrize("depth", ["FLOAT", "DOUBLE"])
    def test_that_are_none_are_refused_by_name(self, samples, rate, why, depth):
        file = io.BytesIO()
        with np.errstate(over="ignore"):
            soundfile.write(file, samples, rate, format="WAV", subtype=depth)
        with pytest.raises(BadSound, match=f"sound 1: {why}"):
            READER.read([File(SOUND, (file.getvalue(),))])

    def test_may_be_louder_than_the_full_scale(self):
        file = io.BytesIO()
        soundfile.write(file, np.linspace(-4, 4, 999), 16000, format="WAV", subtype="FLOAT")
        assert LISTENING.read(file.getvalue()).abs().max() == 4

    def test_from_a_pipe_have_no_length_and_those_cut_short_are_refused(self):
        whole = noise()
        endless = whole[:4] + b"\xff" * 4 + whole[8:40] + b"\xff" * 4 + whole[44:]
        assert LISTENING.read(endless).equal(LISTENING.read(whole))
        for data in (whole[:-2], whole[:3000], noise(kind="FLAC")[:-200]):
            with pytest.raises(BadSound):
                LISTENING.read(data)
