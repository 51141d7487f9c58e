# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Initial weights come from an element's own place in its parameter."""

import pytest
import torch

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.mimo.setup import initialization
from megatron.core.models.mimo.setup.initialization import Numbers, normal

PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
"""The first numbers of SplitMix64 from 1234567 (rosettacode.org/wiki/Pseudo-random_numbers)."""


def test_numbers_are_those_of_splitmix64():
    bits = Numbers(1234567, torch.arange(1, 5)).bits
    assert [number % 2**64 for number in bits.tolist()] == PUBLISHED


def test_distributions_have_their_moments():
    numbers = Numbers(-3, torch.arange(2**20))
    drawn = numbers.normal(2.0) / 2
    moments = [(drawn**power).mean().item() for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.04)
    assert (drawn[1:] * drawn[:-1]).mean().item() == pytest.approx(0, abs=0.004)
    flat = numbers.uniform(-1, 3)
    assert [flat.mean().item(), flat.var().item()] == pytest.approx([1, 4 / 3], abs=0.01)
    assert -1 <= flat.min() < -0.999 and 2.999 < flat.max() <= 3


@pytest.mark.parametrize("at_once", [1, 7, 2**20])
def test_a_shard_has_its_part_of_the_whole(at_once, monkeypatch):
    """An expert's weights, of rows and columns that ranks share, a few rows at a time."""
    rules = [("*", normal(1.0))]

    def drawn(shape, *offsets, axes=0):
        data = torch.empty(shape)
        part = ShardedTensor.from_rank_offsets("a", data, *offsets, prepend_axis_num=axes)
        return initialization._drawn(part, 5, rules)

    whole = drawn((4, 6, 10))
    monkeypatch.setattr(initialization, "AT_ONCE", at_once)
    for expert in range(4):
        for row in range(2):
            for column in range(5):
                place = ((0, expert, 4), (1, row, 2), (2, column, 5))
                part = drawn((3, 2), *place, axes=1)
                rows, columns = slice(3 * row, 3 * row + 3), slice(2 * column, 2 * column + 2)
                assert torch.equal(part, whole[expert, rows, columns])
