# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Damaged files of every kind, and a tokenizer that fails: each sample is read, or is named."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.mimo.nemotron_vlm.data.patch_grids import grids_of, tubelets_of
from examples.mimo.nemotron_vlm.data.sample import IMAGES, SOUND
from examples.mimo.nemotron_vlm.energon import images
from examples.mimo.nemotron_vlm.energon.conversation import VIDEO, Chat
from examples.mimo.nemotron_vlm.energon.encoding import File
from examples.mimo.nemotron_vlm.energon.errors import BadClip, BadImage, BadSound, MissingPackage
from examples.mimo.nemotron_vlm.energon.store import open_split
from examples.mimo.nemotron_vlm.energon.survey import GOOD, STATES, load_survey, make_survey
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    CRUDE,
    byte_tokenizer,
    make_shard,
    omni,
)
from tests.unit_tests.examples.nemotron_vlm.energon.test_energon_as_transformers import (
    DEPTHS,
    READER,
    colours,
    mp4,
    noise,
    oriented,
    palette,
    saved,
)

WHOLE = {
    "jpg": [saved(colours(), "JPEG"), saved(colours("CMYK"), "JPEG"), oriented("JPEG", 6)],
    "png": [saved(colours(), "PNG"), saved(colours("RGBA"), "PNG"), palette("PNG", transparency=3)],
    "webp": [saved(colours(), "WEBP"), saved(colours("RGBA"), "WEBP", lossless=True)],
    "gif": [palette("GIF", transparency=3)],
    "tiff": [saved(colours(), "TIFF"), saved(colours("LAB"), "TIFF"), oriented("TIFF", 8)],
    "bmp": [saved(colours(), "BMP"), saved(colours("1"), "BMP")],
    "ppm": [saved(colours(), "PPM")],
    "wav": [noise(depth=depth) for depth in (*DEPTHS, "ULAW")] + [noise(8000, 2)],
    "flac": [noise(kind="FLAC"), noise(44100, 2, "FLAC", "PCM_24")],
    "mp4": [mp4(), mp4("90")],
    "frames": [saved(colours(), "PNG"), saved(colours(), "JPEG")],
}
KINDS = {"wav": SOUND, "flac": SOUND, "mp4": VIDEO, "frames": VIDEO}
ERRORS = {IMAGES: BadImage, SOUND: BadSound, VIDEO: BadClip}
TIMES = 25
"""How often each file is damaged; the fuzz takes some seconds."""


def damaged(whole: bytes, draw: np.random.Generator) -> bytes:
    """Return a file that is cut, or in which some bytes are changed, lost or doubled."""
    data = bytearray(whole)
    # Headers hold what decoders trust; they are hit as often as the rest.
    reach = min(len(data), int(draw.choice([64, len(data)])))
    first = int(draw.integers(reach))
    last = first + int(draw.integers(1, 9))
    match draw.integers(5):
        case 0:
            del data[first:]
        case 1:
            data[first:last] = draw.bytes(last - first)
        case 2:
            data[first:last] = draw.choice([b"\0", b"\xff"]) * (last - first)
        case 3:
            del data[first:last]
        case 4:
            data[first:first] = data[first : first + 40]
    return bytes(data)


def files(name: str) -> list[bytes]:
    draw = np.random.default_rng(list(name.encode()))
    return [damaged(whole, draw) for whole in WHOLE[name] for _ in range(TIMES)]


@pytest.mark.parametrize("name", WHOLE)
def test_a_damaged_file_is_read_or_refused_in_a_line(name):
    kind, refused = KINDS.get(name, IMAGES), 0
    for data in files(name):
        given = (WHOLE[name][0], data) if name == "frames" else (data,)
        try:
            (read,) = READER.read([File(kind, given, 2.0)])
        except ERRORS[kind] as error:
            assert len(str(error).splitlines()) == 1 and str(error).isprintable()
            refused += 1
            continue
        assert read.made.isfinite().all()
        size = np.array([read.extent.size])
        shape = {SOUND: (*size,), IMAGES: (*grids_of(size)[0],)}
        shape[VIDEO] = (*tubelets_of(size), *shape[IMAGES])
        assert read.made.shape[: len(shape[kind])] == shape[kind]
    assert refused


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    return byte_tokenizer(tmp_path / "tokenizer", None, ["<image>", "<so_embedding>"])


def surveyed(path: Path, tokenizer: Path, samples: list[dict]) -> dict[str, str]:
    """Return the kinds and reasons of the bad samples, by name; the survey ends in any case."""
    path.mkdir()
    make_shard(path, samples, CRUDE)
    (dataset,) = open_split(path, "train").datasets
    make_survey(dataset, omni(tokenizer))
    found = load_survey(dataset, omni(tokenizer))
    assert [sample.index for sample in found.bad] == np.flatnonzero(found.state != GOOD).tolist()
    return {sample.name: f"{STATES[sample.state]}: {sample.reason}" for sample in found.bad}


def talk(kind: str) -> bytes:
    return json.dumps({"caption": "3", "prompt": f"<{kind.removesuffix('s')}>"}).encode()


def test_a_survey_counts_every_damaged_file(tmp_path, tokenizer):
    samples = []
    for name in sorted(WHOLE.keys() - {"frames"}):
        kind = KINDS.get(name, IMAGES)
        samples += [{"json": talk(kind), name: data} for data in files(name)[:8]]
        samples.append({"json": talk(kind), name: b""})
    bad = surveyed(tmp_path / "data", tokenizer, samples)
    for number, sample in enumerate(samples):
        name = next(name for name in sample if name != "json")
        reason = bad.get(f"a.tar/{number}", "")
        assert reason or sample[name]
        assert not reason or reason.startswith(f"{ERRORS[KINDS.get(name, IMAGES)].kind}: ")


class Panic(BaseException):
    """Stands for a panic of code in Rust."""


@pytest.mark.parametrize("error", [TypeError("no text"), RecursionError(), Panic("\ud83d\n!")])
def test_a_survey_counts_what_a_tokenizer_raises(tmp_path, tokenizer, monkeypatch, error):
    encode = Chat.encode

    def failing(chat, turns, *more):
        if "4" in str(turns):
            raise error
        return encode(chat, turns, *more)

    monkeypatch.setattr(Chat, "encode", failing)
    samples = [{"txt": text.encode()} for text in "343"]
    (named,) = surveyed(tmp_path / "data", tokenizer, samples).items()
    assert named[0] == "a.tar/1"
    assert named[1].startswith(f"bad text: {type(error).__name__}: ")
    assert len(named[1].splitlines()) == 1


@pytest.mark.parametrize("error", [TypeError("none"), MemoryError(), ZeroDivisionError("by 0")])
def test_a_survey_counts_what_a_decoder_raises(tmp_path, tokenizer, monkeypatch, error):
    def failing(_):
        raise error

    monkeypatch.setattr(images.ImageOps, "exif_transpose", failing)
    samples = [{"json": talk(IMAGES), "png": WHOLE["png"][0]}, {"txt": b"3"}]
    bad = surveyed(tmp_path / "data", tokenizer, samples)
    line = str(error) or type(error).__name__
    assert bad == {"a.tar/0": f"bad image: image 1: damaged: {line}"}


def test_a_survey_ends_where_a_package_is_missing(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(MissingPackage, match="sound needs soundfile, soxr"):
        surveyed(tmp_path / "data", tokenizer, [{"json": talk(SOUND), "wav": WHOLE["wav"][0]}])
