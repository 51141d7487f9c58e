# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A loading process that dies at the worst moment."""

import time
from collections.abc import Iterator
from types import SimpleNamespace

import psutil

from examples.mimo.nemotron_vlm.data import loading_processes
from examples.mimo.nemotron_vlm.data.loading_processes import read_ahead

TAKES, LATER = 12, 6


class Echo:
    """Reads the number of a take's sample."""

    source = SimpleNamespace(name=lambda split, number: f"{split} {number}")

    def __getitem__(self, take: SimpleNamespace) -> int:
        return take.rows[0][0]


def takes(before: list[psutil.Process]) -> Iterator[SimpleNamespace]:
    """Yield takes; a loading process dies while one is made."""
    for number in range(TAKES):
        if number == LATER:
            (first, *_) = [each for each in psutil.Process().children() if each not in before]
            first.kill()
            time.sleep(0.5)  # SIGCHLD arrives
        yield SimpleNamespace(split="train", rows=[[number]], shares={})


def test_a_death_while_a_take_is_handed_out_loses_no_take(monkeypatch):
    """An error raised within a generator would end it, and with it the run's samples."""
    monkeypatch.setattr(loading_processes, "PAUSES_S", (0.01,) * 4)
    before = psutil.Process().children()
    read = read_ahead(Echo(), takes(before), num_workers=2, prefetch_factor=2)
    assert list(zip(range(TAKES), read, strict=False)) == [(n, n) for n in range(TAKES)]
