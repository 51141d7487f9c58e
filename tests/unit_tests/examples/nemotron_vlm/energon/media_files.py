# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Files of images, clips and sounds that the tests make."""

import io
import struct
from itertools import product

import av
import numpy as np
import soundfile
from PIL import Image, ImageOps

WIDTH, HEIGHT = 40, 24
RATES = (8000, 11025, 16000, 22050, 32000, 44100, 48000)
DEPTHS = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")


def colours(mode: str = "RGB") -> Image.Image:
    """Return a picture whose corners differ, also in colours that transparency hides."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    channels = [x * 255 // WIDTH, y * 255 // HEIGHT, 255 - x * 6, (x * y) % 256]
    shown = Image.fromarray(np.stack(channels, -1).astype(np.uint8), "RGBA")
    return shown if mode == "RGBA" else shown.convert("LA" if mode == "LA" else "RGB").convert(mode)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    """Return the file of an image."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def oriented(kind: str, orientation: int, image: Image.Image | None = None, **options) -> bytes:
    """Return a file whose EXIF data says how to turn it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(image or colours(), kind, exif=exif, **options)


def palette(kind: str, **options) -> bytes:
    """Return a file of 16 colours."""
    return saved(colours().quantize(16), kind, **options)


PAGES = {"save_all": True, "append_images": [ImageOps.flip(colours())]}
OPAQUE = {
    **{
        f"{k} EXIF {n}": oriented(k, n)
        for k, n in product(("JPEG", "PNG", "WEBP", "TIFF"), range(1, 9))
    },
    **{f"PNG {mode}": saved(colours(mode), "PNG") for mode in ("1", "L", "RGB", "P")},
    **{f"JPEG {mode}": saved(colours(mode), "JPEG") for mode in ("L", "RGB", "CMYK")},
    "JPEG progressive": saved(colours(), "JPEG", progressive=True),
    **{f"TIFF {mode}": saved(colours(mode), "TIFF") for mode in ("1", "L", "CMYK", "LAB", "YCbCr")},
    **{k: saved(colours(), k) for k in ("BMP", "GIF", "PPM", "ICO", "TGA", "JPEG2000")},
    **{f"{k} of two pages": saved(colours(), k, **PAGES) for k in ("GIF", "WEBP", "TIFF", "PNG")},
}
TRANSPARENT = {
    **{f"PNG {mode}": saved(colours(mode), "PNG") for mode in ("RGBA", "LA")},
    **{f"{kind} RGBA": saved(colours("RGBA"), kind) for kind in ("WEBP", "TIFF", "TGA", "ICO")},
    "WEBP RGBA, lossless": saved(colours("RGBA"), "WEBP", lossless=True),
    "TIFF LA": saved(colours("LA"), "TIFF"),
    "PNG with a transparent entry": palette("PNG", transparency=3),
    "PNG with transparencies": palette("PNG", transparency=bytes(range(0, 160, 10))),
    "GIF with a transparent entry": palette("GIF", transparency=3),
    "PNG RGB with a transparent colour": saved(colours(), "PNG", transparency=(0, 0, 255)),
    "PNG L with a transparent colour": saved(colours("L"), "PNG", transparency=100),
}
DEEP = np.arange(WIDTH * HEIGHT, dtype=np.uint16).reshape(HEIGHT, WIDTH) * 68
"""Greys of 16 bits."""


def mp4(clockwise: str = "0", **options: str) -> bytes:
    """Return five frames of colours, with the matrix of a camera that was held upright or turned.

    Args:
        options: of the container.
    """
    file, size = io.BytesIO(), (64, 48)
    y, x = np.mgrid[: size[1], : size[0]].astype(np.uint8)
    with av.open(file, "w", format="mp4", options=options) as container:
        stream = container.add_stream("libx264", rate=4, options={"crf": "5"})
        (stream.width, stream.height), stream.pix_fmt = size, "yuv420p"
        stream.codec_context.thread_count = 1  # several threads need not write the same bytes
        for number in range(5):
            # Luma, then a quarter of each chroma: made of RGB, it would not always be the same.
            planes = 3 * x + 20 * number, y[::2, ::2] * 5, x[::2, ::2] * 4
            rows = np.concatenate([plane.reshape(-1, size[0]) for plane in planes])
            frame = av.VideoFrame.from_ndarray(rows, format="yuv420p")
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


def cut(clip: bytes, frames: int) -> bytes:
    """Return a clip without its first frames, cut without encoding: the file has these frames,
    and its edit list hides them."""
    file, options = io.BytesIO(), {"avoid_negative_ts": "disabled"}
    with av.open(io.BytesIO(clip)) as whole, av.open(file, "w", "mp4", options) as part:
        stream = whole.streams.video[0]
        copy = part.add_stream_from_template(stream)
        start = round(frames / stream.average_rate / stream.time_base)
        for packet in (each for each in whole.demux(stream) if each.size):
            packet.pts, packet.dts, packet.stream = packet.pts - start, packet.dts - start, copy
            part.mux(packet)
    return file.getvalue()


def sound(samples: np.ndarray, rate: int = 16000, kind="WAV", depth="PCM_16") -> bytes:
    """Return a file of samples from -1 to 1, [samples] or [samples, channels]."""
    file = io.BytesIO()
    with np.errstate(over="ignore"):
        soundfile.write(file, samples, rate, format=kind, subtype=depth)
    return file.getvalue()


def noise(rate: int = 16000, channels: int = 1, kind="WAV", depth="PCM_16") -> bytes:
    """Return a quarter of a second, to which all frequencies belong."""
    samples = np.random.default_rng(rate).standard_normal((rate // 4 + 1, channels)) / 10
    return sound(samples, rate, kind, depth)


def without_length() -> bytes:
    """Return an MP3 file as a radio sends it, whose frames no header counts."""
    file, samples = io.BytesIO(), np.float32(np.sin(np.arange(32256) / 9) / 9)
    with av.open(file, "w", format="mp3", options={"write_xing": "0"}) as container:
        stream = container.add_stream("libmp3lame", rate=16000, layout="mono")
        for part in np.split(samples, 56):
            frame = av.AudioFrame.from_ndarray(part[None], format="fltp", layout="mono")
            frame.sample_rate = 16000
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


SOUNDS = {
    f"{kind} {depth}, {rate} × {channels}": noise(rate, channels, kind, depth)
    for rate, channels, kind, depth in (
        *product(RATES, (1, 2), ("WAV", "FLAC"), ["PCM_16"]),
        *((16000, 1, "WAV", depth) for depth in DEPTHS),
        (44100, 2, "MP3", "MPEG_LAYER_III"),
        (48000, 1, "OGG", "VORBIS"),
        (16000, 1, "OGG", "OPUS"),
        (44100, 6, "WAVEX", "PCM_24"),
        (22050, 2, "FLAC", "PCM_24"),
        (8000, 1, "WAV", "ULAW"),
    )
}
SOUNDS["MP3 without its length"] = without_length()
SOUNDS["WAV FLOAT, louder than the full scale"] = sound(np.linspace(-4, 4, 999), depth="FLOAT")
_whole, _length = noise(), b"\xff" * 4
SOUNDS["WAV from a pipe, without a length"] = b"".join(
    [_whole[:4], _length, _whole[8:40], _length, _whole[44:]]
)
