# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""How long a rank may be at what it does, for the watch over faults."""

from examples.mimo.nemotron_vlm import progress


def test_only_the_first_time_has_longer(monkeypatch):
    monkeypatch.setattr(progress, "_done_before", set())

    def patience_within(kind: str) -> int:
        with progress.first_time(kind, 20):
            progress.note("a microbatch", patience=2)
            return progress.now().patience

    assert [patience_within(kind) for kind in ("training", "training", "evaluation")] == [40, 2, 40]
    progress.note("another")
    assert progress.now().patience == 1
