# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of the tasks 'omni': words to read, tones to hear, clips to watch, all with true answers.

A line of text has one or two words in Pillow's own font, with more or less space around, so images
have many shapes. A tone rises, falls, or does one after the other, in noise. In a clip, a disc
moves.
"""

import io
import wave

import numpy as np
from PIL import Image, ImageDraw, ImageFont

WORDS = ("apple", "bird", "cloud", "fish", "house", "milk", "sun", "tree")
SECOND = 0.3
"""Share of the lines that have a second word."""
LOW, HIGH = 300, 2800
TONES = {"rising": (LOW, HIGH), "falling": (HIGH, LOW)}
TONES |= {"hill": (LOW, HIGH, LOW), "valley": (HIGH, LOW, HIGH)}
"""Frequencies through which a tone goes, in Hz. None stays: a sound's features are what changes."""

WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Steps of a disc to the right and down."""

FRAMES = (3, 6)
HEIGHT = 12
"""Height of a word in pixels."""
CELL = 8
"""Sides of lines are multiples of so many pixels, which become a row of ``tiny-omni``."""
SECONDS = (0.2, 0.5)
RATES = (16000, 16000, 8000, 22050)
ASKED = ("read", "hear", "watch")
LABELS = ("Frame", "frame", "and", ":")
VOCABULARY = (*ASKED, *LABELS, *WORDS, *TONES, *WAYS)


def sample(draw: np.random.Generator) -> tuple[dict[str, bytes], str, str]:
    """Draw the files of a sample, a question with their placeholders, and the answer."""
    kind = draw.choice(["words", "tone", "clip", "both", "text"], p=[0.5, 0.12, 0.22, 0.08, 0.08])
    words = " ".join(draw.choice(WORDS, size=1 + (draw.random() < SECOND)))
    name, way = (str(draw.choice(list(known))) for known in (TONES, WAYS))
    if kind == "text":
        return {}, f"copy {words}", words
    if kind == "words":
        return {"png": line_of(draw, words)}, "read <image>", words
    if kind == "tone":
        return {"wav": tone(draw, *TONES[name])}, "hear <sound>", name
    if kind == "clip":
        frames = enumerate(clip(draw, *WAYS[way]))
        return {f"video.{n}.png": frame for n, frame in frames}, "watch <video>", way
    files = {"png": line_of(draw, words), "wav": tone(draw, *TONES[name])}
    return files, "read <image> hear <sound>", f"{words} {name}"


def line_of(draw: np.random.Generator, text: str) -> bytes:
    """Draw a line of text, dark on light, as PNG."""
    font = ImageFont.load_default(HEIGHT)
    left, top, right, bottom = font.getbbox(text)
    ends = np.ceil([right - left + 2, bottom - top + 2]).astype(int)
    size = tuple(((-(-ends // CELL) + draw.integers(0, 2, size=2)) * CELL).tolist())
    light, dark = (int(draw.integers(*range_)) for range_ in ((200, 256), (0, 60)))
    image = Image.new("RGB", size, (light,) * 3)
    ImageDraw.Draw(image).text((1 - left, 1 - top), text, font=font, fill=(dark,) * 3)
    return image_bytes(image)


def clip(draw: np.random.Generator, right: int, down: int) -> list[bytes]:
    """Draw the frames of a clip, in which a dark disc moves, as PNG."""
    count, radius, step = int(draw.integers(*FRAMES)), draw.uniform(2.5, 4), draw.uniform(2, 3)
    width, height = draw.integers(16, 21, size=2).tolist()
    light, dark = int(draw.integers(200, 256)), int(draw.integers(0, 60))
    x, y = (draw.uniform(side / 2 - 2, side / 2 + 2) for side in (width, height))
    frames = []
    for number in range(count):
        image = Image.new("RGB", (width, height), (light,) * 3)
        far = (number - (count - 1) / 2) * step
        place = x + right * far, y + down * far
        ImageDraw.Draw(image).circle(place, radius, fill=(dark,) * 3)
        frames.append(image_bytes(image))
    return frames


def image_bytes(image: Image.Image, kind: str = "PNG") -> bytes:
    """Encode an image as a file of kind 'PNG' or 'JPEG'."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def tone(draw: np.random.Generator, *through: float) -> bytes:
    """Make a tone through frequencies, in noise, as WAV of any rate and one or two channels."""
    rate, channels = int(draw.choice(RATES)), int(draw.integers(1, 3))
    count = int(rate * draw.uniform(*SECONDS))
    frequencies = draw.uniform(0.9, 1.1) * np.array(through)
    times = np.linspace(0, len(through) - 1, count)
    phase = np.cumsum(np.interp(times, range(len(through)), frequencies)) * (2 * np.pi / rate)
    loud = draw.uniform(0.2, 0.8)
    samples = loud * np.sin(phase)[:, None] + draw.normal(0, 0.02, (count, channels))
    return sound_bytes(samples * 32000, rate)


def sound_bytes(samples: np.ndarray, rate: int) -> bytes:
    """Encode samples [n, channels], of at most 15 bits and a sign, as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((samples.shape[1], 2, rate, 0, "NONE", ""))
        writer.writeframes(samples.clip(-32768, 32767).astype("<i2").tobytes())
    return file.getvalue()
