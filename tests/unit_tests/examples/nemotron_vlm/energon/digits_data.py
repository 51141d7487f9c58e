# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Make, survey, damage and open the data sets of the tests."""

import contextlib
import io
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import webdataset
import yaml
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401 (ranks share it)

from examples.mimo.nemotron_vlm.energon.conversation import Chat
from examples.mimo.nemotron_vlm.energon.encoding import Encoder
from examples.mimo.nemotron_vlm.energon.images import Resizing, Tiling
from examples.mimo.nemotron_vlm.energon.source import EnergonSource
from examples.mimo.nemotron_vlm.energon.store import open_split
from examples.mimo.nemotron_vlm.energon.survey import make_survey
from examples.mimo.nemotron_vlm.energon.videos import Watching
from examples.mimo.nemotron_vlm.model.presets import tiny, tiny_omni
from megatron.energon import BaseWebdatasetFactory
from tests.unit_tests.test_utilities import Utils

sys.path.insert(0, str(Path(__file__).resolve().parents[5] / "tools" / "data"))

import make_webdataset  # noqa: E402

CRUDE = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
CLIPS = tiny_omni().with_images_of_any_size().images.clips
GRIDS = tiny().with_images_of_any_size().images.grids


def make_digits(path: Path, samples: int, seed: int, *more: str) -> None:
    """Write a data set in shards of 24 samples; ``more`` are options of the maker."""
    options = ["--samples", str(samples), "--seed", str(seed), "--samples-per-shard", "24"]
    assert make_webdataset.main([str(path), *options, *more]) == 0


def make_shard(path: Path, samples: list[dict], config: dict) -> None:
    """Write a data set of one shard, with the contents of its dataset.yaml."""
    with webdataset.TarWriter(str(path / "a.tar")) as tar:
        for number, files in enumerate(samples):
            tar.write({"__key__": f"{number}"} | files)
    parts = [("train", "a.*"), ("val", "b.*")]
    BaseWebdatasetFactory.prepare_dataset(path, ["a.tar"], split_parts_patterns=parts, workers=1)
    (path / ".nv-meta" / "dataset.yaml").write_text(yaml.dump(config))


def byte_tokenizer(path: Path, template: str | None, special: Sequence[str]) -> Path:
    """Write a tokenizer with a template: every byte is a token, and those of ``special``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>", "</s>", *special])
    given = {"tokenizer_object": made, "eos_token": "</s>", "chat_template": template}
    PreTrainedTokenizerFast(**given).save_pretrained(path)
    return path


def image(width: int, height: int, kind: str = "PNG") -> bytes:
    """Return the file of a black image."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, kind)
    return file.getvalue()


@contextlib.contextmanager
def shared_digits(samples: int) -> Iterator[Path]:
    """Make and survey a data set on the first rank, for all ranks; ``omni`` is beside it."""
    with Utils.shared_directory() as directory:
        made = directory / "digits"
        with Utils.first_rank_first() as first:
            if first:
                make_digits(made, samples, seed=2)
                survey(made)
                make_digits(directory / "omni", samples, 2, "--tasks", "omni")
                survey(directory / "omni", makes=[omni])
        yield made


def encoder(tokenizer: Path) -> Encoder:
    """Make the encoder of the preset ``tiny``."""
    return Encoder(Chat(tokenizer), Tiling(16, tokens=4))


READER = Encoder(
    None,
    Resizing(GRIDS),
    subsampling=tiny_omni().encoders[1].subsampling_factor,
    video=Watching(CLIPS),
)
"""Reads media as the preset ``tiny-omni`` does; it has no tokenizer, which texts alone need."""


def whole(tokenizer: Path) -> Encoder:
    """Make the encoder of the preset ``tiny`` with images of any size."""
    return Encoder(Chat(tokenizer), Resizing(GRIDS))


def omni(tokenizer: Path) -> Encoder:
    """Make the encoder of the preset ``tiny-omni`` with images of any size."""
    return replace(READER, chat=Chat(tokenizer, sound=True))


def survey(
    path: Path,
    tokenizer: Path | None = None,
    splits=("train", "test"),
    makes=(encoder, whole),
    **options,
) -> None:
    """Survey a data set as tiles and as images of any size; its tokenizer is in it by default."""
    for split in splits:
        for dataset in open_split(path, split).datasets:
            for make in makes:
                make_survey(dataset, make(tokenizer or path / "tokenizer"), **options)


def source(path: Path, tokenizer: Path | None = None, **options) -> EnergonSource:
    """Open a data set; its tokenizer is in it by default."""
    given = {"encoder": encoder(tokenizer or path / "tokenizer")}
    return EnergonSource(path, **given | {"seq_length": 32, "seed": 5} | options)


def damage_image(path: Path, shard: str) -> str:
    """Overwrite the second half of a shard's second image; returns ``shard/key``."""
    with tarfile.open(path / shard) as tar:
        member = [m for m in tar if not m.name.endswith(".json")][1]
    with open(path / shard, "r+b") as file:
        file.seek(member.offset_data + member.size // 2)
        file.write(bytes(member.size - member.size // 2))
    return f"{shard}/{member.name.partition('.')[0]}"


def names(opened: EnergonSource, split: str, numbers: range) -> list[str]:
    """``shard/key`` of samples."""
    return ["/".join(Path(opened.name(split, number)).parts[-2:]) for number in numbers]
