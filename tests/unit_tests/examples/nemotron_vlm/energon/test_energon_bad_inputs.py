# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Whatever a sample holds, it is read, or a survey counts and names it in a line."""

import contextlib
import io
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples.mimo.nemotron_vlm.energon import images
from examples.mimo.nemotron_vlm.energon.__main__ import main
from examples.mimo.nemotron_vlm.energon.conversation import VIDEO, Chat
from examples.mimo.nemotron_vlm.energon.encoding import Encoder
from examples.mimo.nemotron_vlm.energon.errors import BadMedium
from examples.mimo.nemotron_vlm.energon.images import Resizing
from examples.mimo.nemotron_vlm.energon.records import Medium
from examples.mimo.nemotron_vlm.energon.store import open_split
from examples.mimo.nemotron_vlm.energon.survey import STATES, load_survey, make_survey
from examples.mimo.nemotron_vlm.energon.videos import Watching
from examples.mimo.nemotron_vlm.model.names import IMAGES, SOUND
from examples.mimo.nemotron_vlm.model.patch_grids import grids_of, tubelets_of
from tests.unit_tests.examples.nemotron_vlm.energon.bad_samples import (
    BAD,
    GOOD,
    PNG,
    of,
    with_media,
)
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    CLIPS,
    CRUDE,
    GRIDS,
    READER,
    byte_tokenizer,
    image,
    make_shard,
    omni,
)
from tests.unit_tests.examples.nemotron_vlm.energon.media_files import (
    DEPTHS,
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
"""Whole files, by the suffix under which they are damaged."""
KINDS = {"wav": SOUND, "flac": SOUND, "mp4": VIDEO, "frames": VIDEO}
TIMES = 25
"""How often each file is damaged; the fuzz takes some seconds."""


def damaged(whole: bytes, draw: np.random.Generator) -> bytes:
    """Return a file that is cut, or in which some bytes are changed, lost or doubled."""
    # Headers hold what decoders trust; they are hit as often as the rest.
    first = int(draw.integers(min(len(whole), int(draw.choice([64, len(whole)])))))
    last = first + int(draw.integers(1, 9))
    before, hit, after = whole[:first], whole[first:last], whole[last:]
    others = draw.bytes(len(hit)), bytes(len(hit)), b"\xff" * len(hit), b"", 40 * hit
    return before + others[draw.integers(5)] + after if draw.integers(5) else before


def fuzz(name: str) -> list[bytes]:
    draw = np.random.default_rng(list(name.encode()))
    return [damaged(whole, draw) for whole in WHOLE[name] for _ in range(TIMES)]


@pytest.mark.parametrize("name", WHOLE)
def test_a_damaged_file_is_read_or_refused_in_a_line(name):
    kind, refused = KINDS.get(name, IMAGES), 0
    for data in fuzz(name):
        given = (WHOLE[name][0], data) if name == "frames" else (data,)
        try:
            (read,) = READER.read([Medium(kind, given, 2.0)])
        except BadMedium as error:
            assert error.kind == f"bad {kind.removesuffix('s')}"
            assert len(str(error).splitlines()) == 1 and str(error).isprintable()
            refused += 1
            continue
        assert read.made.isfinite().all()
        size = np.array([read.extent.size])
        shape = {SOUND: (*size,), IMAGES: (*grids_of(size)[0],)}
        shape[VIDEO] = (*tubelets_of(size), *shape[IMAGES])
        assert read.made.shape[: len(shape[kind])] == shape[kind]
    assert refused


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    return byte_tokenizer(path, None, ["<image>", "<so_embedding>"])


def survey(path: Path, tokenizer: Path, samples: list[dict]) -> dict[int, str]:
    """Return the kinds and reasons of the bad samples, by number."""
    make_shard(path, samples, CRUDE)
    (dataset,) = open_split(path, "train").datasets
    make_survey(dataset, omni(tokenizer))
    return reasons_of(path, tokenizer)


def reasons_of(path: Path, tokenizer: Path) -> dict[int, str]:
    found = load_survey(open_split(path, "train").datasets[0], omni(tokenizer)).bad
    assert all(sample.name == f"a.tar/{sample.index}" for sample in found)
    return {sample.index: f"{STATES[sample.state]}: {sample.reason}" for sample in found}


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory, tokenizer) -> tuple[str, dict[int, str]]:
    """Survey all samples of the tables; return what is printed, and what is bad."""
    path = tmp_path_factory.mktemp("bad")
    make_shard(path, [*(sample for sample, _ in BAD), *GOOD], CRUDE)
    words = [str(path), "--tokenizer-model", str(tokenizer), "--model", "tiny-omni"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main([*words, "--dynamic-resolution", "--names", "1"]) == 0
    return said.getvalue(), reasons_of(path, tokenizer)


def test_bad_samples_are_named_with_their_reasons_and_counted_by_kind(surveyed):
    printed, reasons = surveyed
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


class Panic(BaseException):
    """Stands for a panic of code in Rust."""


@pytest.mark.parametrize(
    ("owner", "name", "error", "said"),
    [
        (Chat, "encode", TypeError("no text"), "bad text: TypeError: no text"),
        (Chat, "encode", RecursionError(), "bad text: RecursionError: "),
        (Chat, "encode", Panic("\ud83d\n!"), r"bad text: Panic: \ud83d !"),
        (images.ImageOps, "exif_transpose", TypeError("none"), "bad image: image 1: damaged: none"),
        (images.ImageOps, "exif_transpose", MemoryError(), "bad image: image 1: damaged: Mem"),
    ],
    ids=range(5),
)
def test_a_survey_counts_what_a_library_raises(
    tmp_path, tokenizer, monkeypatch, owner, name, error, said
):
    real = getattr(owner, name)

    def failing(*given):
        if owner is images.ImageOps or "4" in str(given[1]):
            raise error
        return real(*given)

    monkeypatch.setattr(owner, name, failing)
    bad = survey(tmp_path, tokenizer, [{"txt": b"3"}, with_media(png=PNG) | of({"caption": "4"})])
    assert list(bad) == [1] and bad[1].startswith(said) and len(bad[1].splitlines()) == 1


def test_strips_images_without_area_and_clips_of_unknown_speed_are_named(monkeypatch):
    resizing = Resizing(replace(GRIDS, max_patches=10**6))
    with pytest.raises(BadMedium, match="image 1: 4 × 200000 pixels are too long a strip"):
        Encoder(None, resizing).read([Medium(IMAGES, (image(4, 200000),))])
    with pytest.raises(BadMedium, match='needs "fps" in its json'):
        Watching(CLIPS, fps=2.0).read((PNG, PNG), 0.0)
    monkeypatch.setattr(images.Image, "open", lambda *_, **__: images.Image.new("RGB", (0, 7)))
    with pytest.raises(BadMedium, match="image 1: 0 × 7 pixels"):
        READER.read([Medium(IMAGES, (b"",))])


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_a_missing_package_ends_a_survey(tmp_path, tokenizer, monkeypatch, capsys, package):
    monkeypatch.delitem(sys.modules, package, raising=False)
    (tmp_path / f"{package}.py").write_text("raise ModuleNotFoundError")
    monkeypatch.syspath_prepend(tmp_path)
    make_shard(tmp_path, [with_media(wav=noise())], CRUDE)
    words = [str(tmp_path), "--tokenizer-model", str(tokenizer), "--model", "tiny-omni"]
    for workers in "01":
        assert main([*words, "--workers", workers]) == 2
        refused = capsys.readouterr().err.splitlines()[-1]
        assert refused == "error: sound needs soundfile, soxr: pip install '.[sound]'"
