# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Reading of a rank's part of a microbatch into host memory, by loading processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from examples.mimo.common.errors import one_line
from examples.mimo.common.steps import Microbatch
from examples.mimo.nemotron_vlm.data.rows import Packing
from examples.mimo.nemotron_vlm.data.sample import SampleSource, Text
from examples.mimo.nemotron_vlm.data.step_plan import InputRange, Take
from examples.mimo.nemotron_vlm.model.encoders import Encoder
from megatron.core.models.mimo.bridge.batch_plan import BatchPlan
from megatron.core.models.mimo.bridge.plan import AtomRows
from megatron.core.token_layout import pad_lengths, zigzag_owners


class _Sample(NamedTuple):
    """A sample's text, and by encoder the bounds of its inputs' rows, and the rows' CP ranks."""

    text: Text
    bounds: dict[str, np.ndarray]
    owners: dict[str, np.ndarray]


@dataclass(frozen=True)
class Reader(Dataset):
    """A data set that turns a `Take` into MimoModel's keyword arguments.

    Args:
        token_ids: id of the token that each encoder's rows replace, by its name.
        packing: how several samples are packed into a row, which then is a microbatch; None puts
            one sample into a row.
        reads_labels: whether the rank computes a loss.
        cp, sp: CP ranks that a sample is split over, and TP ranks that split it further.
    """

    source: SampleSource
    encoders: tuple[Encoder, ...]
    token_ids: Mapping[str, int]
    seq_length: int
    packing: Packing | None
    reads_labels: bool
    cp: int
    sp: int

    def __getitem__(self, take: Take) -> Microbatch | str:
        """Return the microbatch on the host, or a line saying why it cannot be read.

        Returns:
            ``input_ids``, ``position_ids``, ``sample_places`` [b, S] int64; on ranks with a loss,
            ``labels`` [b, S] int64, ``loss_mask`` [b, S] float32 and ``kinds``, by modality bool
            [samples + 1], which samples have it, and padding none; ``modality_inputs`` with what
            each encoder's entry collates; ``samples``, the sample numbers; ``step_work``; with
            packing, ``packing_kwargs``; if modules are colocated, ``batch_plan``, by which the
            bridges route. ``sample_places`` is the index into ``samples`` of each token's sample.
        """
        try:
            return self._read(take)
        except (ValueError, OSError) as error:  # raised here, it would come with a traceback
            return one_line(error)

    def _read(self, take: Take) -> Microbatch:
        shares = [(each, take.shares[each.name]) for each in self.encoders]
        colocated = shares[0][1].encoded is not None
        numbers = {number for row in take.rows for number in row}
        if colocated and self.cp > 1:
            numbers |= {one.sample for _, share in shares for one in share.ranges}
        samples = {number: self._sample(take.split, number) for number in numbers}
        padded = [self._padded([samples[number].text for number in row]) for row in take.rows]
        batch = self._stacked(padded)
        batch["samples"] = [number for row in take.rows for number in row]
        batch["step_work"] = take.work
        if self.reads_labels:
            batch["kinds"] = self._kinds([samples[number] for number in batch["samples"]])
        lengths = None
        if self.packing:
            lengths = tuple(len(text.input_ids) for text in padded[0])
            batch["packing_kwargs"] = _bounds(lengths, batch["sample_places"])
        batch["modality_inputs"] = {
            each.name: None
            if share.ranges is None
            else {each.key: self._inputs(take.split, each, share.ranges)}
            for each, share in shares
        }
        if colocated:
            encoded, consumed = {}, {}
            for each, share in shares:
                made, used = self._owners(each.name, take, share.ranges, samples)
                encoded[each.name] = AtomRows(share.encoded, made)
                consumed[each.name] = AtomRows(share.consumed, used)
            batch["batch_plan"] = BatchPlan(encoded, consumed, lengths)
        return batch

    def _kinds(self, samples: list[_Sample]) -> dict[str, torch.Tensor]:
        has = {each.name: [s.bounds[each.name][-1] > 0 for s in samples] for each in self.encoders}
        has["text"] = [not any(of_sample) for of_sample in zip(*has.values(), strict=True)]
        return {name: torch.tensor([*of_samples, False]) for name, of_samples in has.items()}

    def _owners(
        self, name: str, take: Take, ranges: list[InputRange], samples: dict[int, _Sample]
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the CP rank of each row of an encoder that the rank encodes and consumes.

        int64 [rows] both; None with one CP rank.
        """
        if self.cp == 1:
            return None, None
        none = np.zeros(0, dtype=np.int64)
        made = [
            samples[p.sample].owners[name][slice(*samples[p.sample].bounds[name][[p.first, p.end]])]
            for p in ranges
        ]
        used = [samples[number].owners[name] for row in take.rows for number in row]
        return np.concatenate([none, *made]), np.concatenate([none, *used])

    def _sample(self, split: str, number: int) -> _Sample:
        text = self.source.text(split, number)
        ids, bounds, owners = text.input_ids.numpy(), {}, {}
        if self.cp > 1:
            lengths = pad_lengths((self._length_of(text),), self.cp, self.sp)
            of_tokens = zigzag_owners(lengths, self.cp)
        for each in self.encoders:
            (sizes,) = self.source.sizes(split, number, 1, each.name)
            bounds[each.name] = np.cumsum([0, *each.rows(sizes)])
            places, wanted = np.flatnonzero(ids == self.token_ids[each.name]), bounds[each.name][-1]
            if len(places) != wanted:
                raise ValueError(
                    f"{self.source.name(split, number)} has {len(places)} tokens of {each.name} "
                    f"for {len(sizes)} inputs, which need {wanted}; correct the data"
                )
            if self.cp > 1:
                owners[each.name] = of_tokens[places]
        return _Sample(text, bounds, owners)

    def _length_of(self, text: Text) -> int:
        """Return the tokens of a sample with its padding."""
        return self.packing.padded(len(text.input_ids)) if self.packing else self.seq_length

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
        ids, labels = (F.pad(part, (0, room), value=self.source.pad_token) for part in text[:2])
        return Text(ids, labels, F.pad(text.loss_mask, (0, room)))

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

    def _inputs(
        self, split: str, encoder: Encoder, ranges: Sequence[InputRange]
    ) -> dict[str, torch.Tensor]:
        parts = []
        for one in ranges:
            whole = self.source.inputs(split, one.sample, encoder.name)
            parts.append(whole[one.first : one.end])
            if len(parts[-1]) != one.end - one.first:
                name = self.source.name(split, one.sample)
                raise ValueError(f"{name} has fewer {encoder.name} than it said")
        return encoder.collate(parts)


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
