# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Reading of a rank's part of a microbatch into host memory, by loading processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch.utils.data import Dataset

from examples.mimo.common.steps import Microbatch
from examples.mimo.nemotron_vlm.data.rows import Packing
from examples.mimo.nemotron_vlm.data.sample import SampleSource
from examples.mimo.nemotron_vlm.data.step_plan import Piece, Take
from examples.mimo.nemotron_vlm.data.text import Text
from megatron.core.models.mimo.bridge.batch_plan import BatchPlan
from megatron.core.models.mimo.bridge.plan import AtomRows
from megatron.core.token_layout import pad_lengths, zigzag_owners


@dataclass(frozen=True)
class Reader(Dataset):
    """A data set that turns a `Take` into MimoModel's keyword arguments.

    Args:
        source: the samples.
        modality, encoder: names under which the tiles are in a batch.
        tile: height and width of a tile in pixels.
        tokens_per_tile: image tokens that a sample has for each of its tiles.
        seq_length: tokens of a row.
        packing: how several samples are packed into a row, which then is a microbatch; None puts
            one sample into a row.
        reads_labels: whether the rank computes a loss.
        cp, sp: CP ranks that a sample is split over, and TP ranks that split it further.
    """

    source: SampleSource
    modality: str
    encoder: str
    tile: int
    tokens_per_tile: int
    seq_length: int
    packing: Packing | None
    reads_labels: bool
    cp: int
    sp: int

    def __getitem__(self, take: Take) -> Microbatch | str:
        """Return the microbatch on the host, or a line saying why it cannot be read.

        Returns:
            ``input_ids``, ``position_ids``, ``sample_places`` [b, S] int64; on ranks with a loss,
            ``labels`` [b, S] int64 and ``loss_mask`` [b, S] float32; ``modality_inputs`` with the
            tiles [n, 3, H, W] uint8; ``samples``, the sample numbers; with packing,
            ``packing_kwargs``; if modules are colocated, ``batch_plan``, by which the bridge
            routes. ``sample_places`` is the index into ``samples`` of each token's sample.
        """
        try:
            return self._read(take)
        except (ValueError, OSError) as error:  # raised here, it would come with a traceback
            return " ".join(str(error).split())

    def _read(self, take: Take) -> Microbatch:
        numbers = {number for row in take.rows for number in row}
        if take.atoms is not None and self.cp > 1:
            numbers |= {piece.sample for piece in take.pieces}
        texts = {number: self._text(take.split, number) for number in numbers}
        padded = [self._padded([texts[number] for number in row]) for row in take.rows]
        batch = self._stacked(padded)
        batch["samples"] = [number for row in take.rows for number in row]
        lengths = None
        if self.packing:
            lengths = tuple(len(sample.input_ids) for sample in padded[0])
            batch["packing_kwargs"] = _bounds(lengths, batch["sample_places"])
        images = None
        if take.pieces is not None:
            images = {self.encoder: {"tiles": self._tiles(take.split, take.pieces)}}
        batch["modality_inputs"] = {self.modality: images}
        if take.atoms is not None:
            batch["batch_plan"] = self._plan(take, texts, lengths)
        return batch

    def _plan(self, take: Take, texts: dict[int, Text], lengths: tuple | None) -> BatchPlan:
        encoded, consumed = (np.array(tiles) * self.tokens_per_tile for tiles in take.atoms)
        made = used = None
        if self.cp > 1:
            owners = {number: self._owners(text) for number, text in texts.items()}
            tile, none = self.tokens_per_tile, np.zeros(0, dtype=np.int64)
            parts = [owners[p.sample][p.first * tile : p.end * tile] for p in take.pieces]
            made = np.concatenate([none, *parts])
            used = np.concatenate([none, *(owners[n] for row in take.rows for n in row)])
        return BatchPlan(
            {self.modality: AtomRows(encoded, made)},
            {self.modality: AtomRows(consumed, used)},
            lengths,
        )

    def _owners(self, text: Text) -> np.ndarray:
        """Return the CP rank of each image token of a sample, int64 [rows]."""
        places = np.flatnonzero(text.input_ids.numpy() == self.source.image_token)
        lengths = pad_lengths((self._length_of(text),), self.cp, self.sp)
        return zigzag_owners(lengths, self.cp)[places]

    def _length_of(self, text: Text) -> int:
        """Return the tokens of a sample with its padding."""
        return self.packing.padded(len(text.input_ids)) if self.packing else self.seq_length

    def _text(self, split: str, number: int) -> Text:
        text = self.source.text(split, number)
        tiles = int(self.source.costs(split, number, 1)[0, 1])
        found = int((text.input_ids == self.source.image_token).sum())
        wanted = tiles * self.tokens_per_tile
        if found != wanted:
            raise ValueError(
                f"sample {number} of {split} has {found} image tokens for {tiles} tiles of "
                f"{self.tokens_per_tile}, which need {wanted}; correct the data"
            )
        return text

    def _padded(self, row: Sequence[Text]) -> list[Text]:
        """Pad the samples of a row so that they fill it."""
        padded = [self._longer(text, self._length_of(text)) for text in row]
        room = self.seq_length - sum(len(t.input_ids) for t in padded)
        nothing = Text(torch.empty(0, dtype=torch.int64), torch.empty(0).long(), torch.empty(0))
        return [*padded, self._longer(nothing, room)] if room else padded

    def _longer(self, text: Text, length: int) -> Text:
        room = length - len(text.input_ids)
        if room < 0:
            raise ValueError(f"{len(text.input_ids)} tokens do not fit {length}")
        ids, labels = (
            torch.cat([part, part.new_full((room,), self.source.pad_token)]) for part in text[:2]
        )
        return Text(ids, labels, torch.cat([text.loss_mask, torch.zeros(room)]))

    def _stacked(self, rows: list[list[Text]]) -> Microbatch:
        lengths = [[len(text.input_ids) for text in row] for row in rows]
        place, places, positions = 0, [], []
        for row in lengths:
            places.append(torch.repeat_interleave(torch.tensor(row)) + place)
            positions.append(torch.cat([torch.arange(length) for length in row]))
            place += len(row)
        names = Text._fields if self.reads_labels else ("input_ids",)
        return {
            name: torch.stack([torch.cat([getattr(text, name) for text in row]) for row in rows])
            for name in names
        } | {"position_ids": torch.stack(positions), "sample_places": torch.stack(places)}

    def _tiles(self, split: str, pieces: Sequence[Piece]) -> torch.Tensor:
        parts = []
        for sample, neighbours in groupby(pieces, key=lambda piece: piece.sample):
            whole = self.source.tiles(split, sample)
            for piece in neighbours:
                parts.append(whole[piece.first : piece.end])
                if len(parts[-1]) != piece.end - piece.first:
                    raise ValueError(f"sample {sample} of {split} has fewer tiles than it said")
        return torch.cat([torch.empty(0, 3, self.tile, self.tile, dtype=torch.uint8), *parts])


def _bounds(lengths: tuple[int, ...], places: torch.Tensor) -> dict[str, object]:
    """Return PackedSeqParams' arguments; given ``seq_idx``, the device need not compute it."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "max_seqlen_q": max(lengths),
        "max_seqlen_kv": max(lengths),
        "seq_idx": places.to(torch.int32),
    }
