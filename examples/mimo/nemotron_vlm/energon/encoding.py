# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Encoding of a conversation as tokens, and of its images, sounds and clips as encoders' inputs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch

from examples.mimo.common.errors import one_line
from examples.mimo.nemotron_vlm.data.reading_options import ReadingOptions
from examples.mimo.nemotron_vlm.data.sample import Text
from examples.mimo.nemotron_vlm.energon.chat_template import MODES
from examples.mimo.nemotron_vlm.energon.conversation import KINDS_OF, PLACEHOLDERS, VIDEO, Chat
from examples.mimo.nemotron_vlm.energon.errors import (
    BadConversation,
    BadMedium,
    MissingPackage,
)
from examples.mimo.nemotron_vlm.energon.images import Resizing, Tiling, open_image
from examples.mimo.nemotron_vlm.energon.records import Medium, Record
from examples.mimo.nemotron_vlm.energon.sounds import read_sound
from examples.mimo.nemotron_vlm.energon.videos import Extent, Watching
from examples.mimo.nemotron_vlm.model.media_sizes import rows_of_sounds
from examples.mimo.nemotron_vlm.model.names import IMAGES, SOUND


class Read(NamedTuple):
    """An image, sound or clip that has been decoded.

    made: an image's tiles, uint8 [n, 3, tile, tile]; an image or a clip as `PatchGrids` and
    `ClipGrids` cut them; or a sound as `read_sound` returns it. None if only the extent was
    asked for.
    """

    kind: str
    extent: Extent
    made: torch.Tensor | None


def read_files(raw: Mapping[str, bytes], media: Sequence[Medium]) -> list[Medium]:
    """Return media with the content of their files, which is a sample's, in place of the names."""
    return [each._replace(files=tuple(raw[name] for name in each.files)) for each in media]


@dataclass(frozen=True)
class Encoder:
    """Encodes samples as tokens, tiles and clips; nothing in it depends on the sequence length.

    images: how each image of a sample is prepared, on its own. prompt: question for samples that
    have only a caption. subsampling: log-mel frames that become a row of a sound; video: how clips
    are prepared; both None for a model that encodes none.
    """

    chat: Chat
    images: Tiling | Resizing
    prompt: str = ReadingOptions.prompt
    subsampling: int | None = None
    video: Watching | None = None

    @property
    def settings(self) -> dict[str, object]:
        """Everything that determines tokens and inputs, except the data."""
        return {
            "chat": self.chat.fingerprint,
            **asdict(self.images),
            "prompt": self.prompt,
            "sound": self.subsampling,
            "video": self.video and asdict(self.video),
        }

    def text(self, record: Record, extents: Sequence[Extent]) -> Text:
        """Return the tokens of a record.

        Args:
            extents: of each image, sound and clip; the size of an image may be its tiles.

        Raises:
            BadConversation: the conversation cannot be tokenized, or no token bears a loss.
        """
        if len(record.media) != len(extents):
            raise BadConversation(f"{len(record.media)} media in the place of {len(extents)}")
        runs, labels = self._runs([medium.kind for medium in record.media], extents)
        ids, answer = self.chat.encode(record.turns, labels, record.arguments)
        repeats = self._repeats(ids, runs)
        ids, answer = np.repeat(ids, repeats), np.repeat(answer, repeats)
        if not answer[1:].any():
            raise BadConversation("no token bears a loss")
        ids = torch.from_numpy(ids)
        return Text(ids[:-1], ids[1:], torch.from_numpy(answer[1:].astype(np.float32)))

    def needed(self, text: Text) -> int:
        """Return the tokens to which a text may be cut: all of its media and one of an answer."""
        ids = text.input_ids.numpy()
        media = np.any([ids == token for token in self.chat.ids.values()], axis=0)
        answers = np.flatnonzero(text.loss_mask.numpy())
        return 1 + max(answers[:1].tolist() + np.flatnonzero(media)[-1:].tolist())

    def question(self, record: Record, extents: Sequence[Extent]) -> np.ndarray:
        """Return the tokens that ask for a conversation's next answer, int64 [n].

        Raises:
            BadConversation: the conversation cannot be tokenized.
        """
        runs, labels = self._runs([medium.kind for medium in record.media], extents)
        ids = self.chat.prompt(record.turns, labels, record.arguments)
        return np.repeat(ids, self._repeats(ids, runs))

    def asked(self, record: Record, extents: Sequence[Extent], text: Text) -> int:
        """Return the first of `MODES` whose question for a text's last answer begins the text, and
        after which a token bears a loss; their number if none does.
        """
        answers = [turn.role == "assistant" and turn.loss for turn in record.turns]
        turns = record.turns[: len(answers) - 1 - answers[::-1].index(True)]
        media = sum(turn.text.count(each) for turn in turns for each in PLACEHOLDERS.values())
        for number, mode in enumerate(MODES):
            before = Record(turns, record.media[:media], {**record.arguments, **mode})
            try:
                ids = self.question(before, extents[:media])
            except BadConversation:
                continue
            is_prefix = np.array_equal(ids, text.input_ids[: len(ids)])
            if is_prefix and len(ids) and text.loss_mask[len(ids) - 1]:
                return number
        return len(MODES)

    def _runs(
        self, kinds: Sequence[str], extents: Sequence[Extent]
    ) -> tuple[dict[str, list[int]], list[list[str]]]:
        """Return how many tokens each token of media becomes, and the labels of clips."""
        runs: dict[str, list[int]] = {kind: [] for kind in self.chat.ids}
        labels = []
        for kind, extent in zip(kinds, extents, strict=True):
            size = np.array([extent.size], np.int64)
            if kind == SOUND:
                runs[SOUND] += rows_of_sounds(size, self.subsampling).tolist()
            elif kind == VIDEO:
                labels.append(self.video.labels(extent))
                runs[IMAGES] += self.images.rows(size).tolist() * len(labels[-1])
            else:
                runs[IMAGES] += self.images.rows(size).tolist()
        return runs, labels

    def _repeats(self, ids: np.ndarray, runs: Mapping[str, Sequence[int]]) -> np.ndarray:
        repeats = np.ones(len(ids), np.int64)
        for kind, token in self.chat.ids.items():
            repeats[ids == token] = runs[kind]
        return repeats

    def read(self, files: Sequence[Medium], whole: bool = True) -> list[Read]:
        """Open and decode each image, sound and clip once.

        Args:
            whole: whether to make encoders' inputs; if not, files are only decoded and measured.

        Raises:
            BadMedium: one cannot be decoded.
        """
        found, counts = [], Counter()
        for file in files:
            counts[file.kind] += 1
            try:
                found.append(Read(file.kind, *self._read(file, whole)))
            except MissingPackage:
                raise
            except Exception as error:  # decoders raise errors of all kinds for damaged files
                name, why = file.kind.removesuffix("s"), one_line(error)
                why = why if isinstance(error, BadMedium) else f"damaged: {why}"
                raise BadMedium(f"{name} {counts[file.kind]}: {why}", name) from error
        return found

    def inputs(
        self, media: Sequence[Read], encoder: str = IMAGES
    ) -> torch.Tensor | list[torch.Tensor]:
        """Return an encoder's inputs: all tiles, uint8 [n, 3, tile, tile], or what `Read` has."""
        made = [each.made for each in media if each.kind in KINDS_OF[encoder]]
        is_tiled = encoder == IMAGES and isinstance(self.images, Tiling)
        return self.images.join(made) if is_tiled else made

    def count(self, media: Sequence[Read]) -> int:
        """Return the number of inputs of the encoder of images: tiles, or images and clips."""
        sizes = [each.extent.size for each in media if each.kind in KINDS_OF[IMAGES]]
        return sum(sizes) if isinstance(self.images, Tiling) else len(sizes)

    def _read(self, file: Medium, whole: bool) -> tuple[Extent, torch.Tensor | None]:
        if file.kind == SOUND:
            if self.subsampling is None:
                raise BadMedium("the model has no encoder of sound")
            sound = read_sound(*file.files)
            return Extent(len(sound)), sound
        if file.kind == VIDEO:
            if self.video is None:
                raise BadMedium("the model encodes no video, or no images of any size")
            extent, frames = self.video.frames_of(file.files, file.fps)
            return extent, self.video.cut(frames) if whole else None
        image, size = open_image(*file.files, small=not whole)
        extent = Extent(self.images.size_of(*size))
        return extent, self.images.cut(image) if whole else None
