# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The survey of a data set: tokens and tiles of every sample, or why it is bad.

Making it reads and decodes everything once. Its file names hash everything that it depends on, so a
survey made for other data, another tokenizer or other tiles is not found; it does not depend on the
sequence length. Each data set has, beside energon's own metadata or in a separate directory:

- ``survey-NAME.npy``, int32 [4, samples]: state, tokens and tiles of each sample, and the
  cumulative number of images, its own included;
- ``survey-NAME.images.npy``, int32 [images]: tiles of each image;
- ``survey-NAME.json``: the bad samples and a hash of all samples' bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.mimo.nemotron_vlm.energon.conversation import BadConversation
from examples.mimo.nemotron_vlm.energon.encoding import Encoder
from examples.mimo.nemotron_vlm.energon.store import (
    BadShard,
    DataSet,
    Excluded,
    Shard,
    Unreadable,
    open_split,
)
from examples.mimo.nemotron_vlm.energon.tiling import BadImage
from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME

FORMAT = 2
GOOD, SHARD, TEXT, IMAGE, EXCLUDED = range(5)
STATES = ("good", "unreadable shard", "bad text", "bad image", "excluded by split.yaml")
STATE_OF = {
    **{BadShard: SHARD, Unreadable: SHARD},
    **{BadConversation: TEXT, BadImage: IMAGE, Excluded: EXCLUDED},
}


@dataclass(frozen=True)
class BadSample:
    """A bad sample.

    index: its index in the data set. name: shard/key. state: index into STATES. reason: one line.
    """

    index: int
    name: str
    state: int
    reason: str


@dataclass(frozen=True)
class Survey:
    """The survey of a data set.

    state, tokens, tiles: int32 [samples of the data set], memory-mapped from the file.

    image_ends: int32 [samples], cumulative number of images, each sample's own included.
    image_tiles: int32 [images], tiles of each image.
    fingerprint: hash of the samples' bytes and of the settings that determine tokens and tiles; the
    same for a copy of the data.
    """

    state: np.ndarray
    tokens: np.ndarray
    tiles: np.ndarray
    image_ends: np.ndarray
    image_tiles: np.ndarray
    bad: list[BadSample]
    fingerprint: str

    def tiles_of_images(self, index: int) -> list[int]:
        """Return the number of tiles of each image of a sample."""
        first = self.image_ends[index - 1] if index else 0
        return self.image_tiles[first : self.image_ends[index]].tolist()


class _ShardSurvey(NamedTuple):
    """The survey of a shard.

    rows: int32 [4, samples]: state, tokens, tiles, images. image_tiles: tiles of each image.
    """

    rows: np.ndarray
    image_tiles: list[int]
    bad: list[BadSample]
    digest: str


def load_survey(dataset: DataSet, encoder: Encoder, folder: Path | None = None) -> Survey | None:
    """Load the survey of a data set; return None if there is none.

    Args:
        folder: directory of surveys; by default that of energon's metadata.
    """
    path = _path(dataset, encoder, folder)
    if not path.is_file():
        return None
    rows, images = (np.load(file, mmap_mode="r") for file in (path, _images(path)))
    notes = json.loads(path.with_suffix(".json").read_text())
    bad = [BadSample(**entry) for entry in notes["bad"]]
    return Survey(*rows, images, bad, notes["fingerprint"])


def make_surveys(
    path: str | Path,
    split: str,
    encoder: Encoder,
    folder: Path | None = None,
    workers: int = 1,
    again: bool = False,
    progress: Callable[[int, int], None] = lambda done, shards: None,
) -> None:
    """Survey the data sets of a split that have no survey yet.

    Args:
        path: as for `open_split`, whose errors are raised.
        workers: number of processes, which take a shard at a time.
        again: survey all data sets, e.g. after a damaged shard was replaced.
        progress: called with the number of shards done, and of all shards.
    """
    datasets = open_split(path, split).datasets
    missing = {}
    for number, dataset in enumerate(datasets):
        if again or load_survey(dataset, encoder, folder) is None:
            missing[_path(dataset, encoder, folder)] = number
    tasks = [(number, shard) for number in missing.values() for shard in datasets[number].shards]
    results: dict[int, list[_ShardSurvey]] = {number: [] for number in missing.values()}
    outcomes = _run(path, split, encoder, tasks, min(workers, len(tasks)))
    for done, ((number, _), outcome) in enumerate(zip(tasks, outcomes, strict=True), 1):
        results[number].append(outcome)
        progress(done, len(tasks))
    for target, number in missing.items():
        _save(target, results[number], encoder)


def survey_shard(dataset: DataSet, encoder: Encoder, shard: Shard) -> _ShardSurvey:
    """Read, encode and decode all samples of a shard."""
    rows = np.zeros((4, shard.count), np.int32)
    images, bad = [], []
    digest = hashlib.blake2b(digest_size=16)
    for place in range(shard.count):
        index = shard.first + place
        try:
            raw = dataset.raw(index)
            for name, content in sorted(raw.items()):
                if not name.startswith("__"):
                    digest.update(f"{raw['__key__']}.{name} {len(content)}\n".encode() + content)
            record = encoder.record(dataset.decode(raw))
            counts = encoder.tiles_of_images(record)
            text, tiles = encoder.text(record, counts), encoder.tiles(record)
            rows[:, place] = GOOD, len(text.input_ids), len(tiles), len(counts)
            images += counts
        except tuple(STATE_OF) as error:
            state = rows[0, place] = STATE_OF[type(error)]
            bad.append(BadSample(index, dataset.name(index), int(state), str(error)))
            digest.update(f"{place} {state}\n".encode())
    return _ShardSurvey(rows, images, bad, digest.hexdigest())


def _path(dataset: DataSet, encoder: Encoder, folder: Path | None) -> Path:
    shards = [(shard.name, shard.count) for shard in dataset.shards]
    depends = json.dumps([FORMAT, encoder.settings, shards, dataset.configuration])
    name = hashlib.sha256(depends.encode()).hexdigest()[:16]
    return (folder or dataset.path / MAIN_FOLDER_NAME) / f"survey-{name}.npy"


def _images(path: Path) -> Path:
    return path.with_suffix(".images.npy")


def _save(path: Path, shards: list[_ShardSurvey], encoder: Encoder) -> None:
    """Write the files of a survey, the main array last: if it is there, the survey is complete."""
    digest = hashlib.sha256(json.dumps(encoder.settings).encode())
    for shard in shards:
        digest.update(shard.digest.encode())
    notes = {
        "settings": encoder.settings,
        "fingerprint": digest.hexdigest(),
        "bad": [asdict(sample) for shard in shards for sample in shard.bad],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
    own.write_text(json.dumps(notes, ensure_ascii=False, indent=1))
    os.replace(own, path.with_suffix(".json"))
    rows = np.concatenate([shard.rows for shard in shards], axis=1)
    rows[3] = np.cumsum(rows[3])
    images = np.array([count for shard in shards for count in shard.image_tiles], np.int32)
    for target, array in ((_images(path), images), (path, rows)):
        with open(own, "wb") as file:
            np.save(file, array)
        os.replace(own, target)


def _run(
    path: str | Path, split: str, encoder: Encoder, tasks: list[tuple[int, Shard]], workers: int
) -> Iterator[_ShardSurvey]:
    if workers < 2:
        _Worker.start(path, split, encoder)
        yield from map(_Worker.survey, tasks)
        return
    server = get_context("forkserver")  # a fork of this process would share the tokenizer's locks
    server.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(
        workers,
        mp_context=server,
        initializer=partial(_Worker.start, path, split, encoder),
    ) as pool:
        yield from pool.map(_Worker.survey, tasks)


class _Worker:
    """State that a process of the pool keeps between shards."""

    datasets: list[DataSet]
    encoder: Encoder

    @classmethod
    def start(cls, path: str | Path, split: str, encoder: Encoder) -> None:
        cls.datasets, cls.encoder = open_split(path, split).datasets, encoder

    @classmethod
    def survey(cls, task: tuple[int, Shard]) -> _ShardSurvey:
        number, shard = task
        return survey_shard(cls.datasets[number], cls.encoder, shard)
