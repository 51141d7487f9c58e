# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A run that is killed while it saves goes on from the checkpoint before, to the last bit."""

import time

from tests.e2e.launch import kill, losses, run, start

ARGUMENTS = (
    *("--encoder", "tp=2", "--language", "ep=2"),
    *("--train-iters", "6", "--save-interval", "2"),
)


def kill_when(processes, appears) -> None:
    """SIGKILL rank 1 as soon as the path is there, then the others."""
    deadline = time.monotonic() + 120
    while not appears.exists():
        assert time.monotonic() < deadline and processes[1].poll() is None
        time.sleep(0.002)
    for process in reversed(processes):
        kill(process)


class TestResume:
    def test_after_a_kill_during_a_save_equals_the_uninterrupted_run(self, tmp_path):
        whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
        ends = run(2, *ARGUMENTS, "--metrics-out", whole, "--save", tmp_path / "whole")
        assert [end.code for end in ends] == [0, 0], ends[0].errors

        saved = tmp_path / "cut"
        kill_when(
            start(2, *ARGUMENTS, "--metrics-out", cut, "--save", saved),
            saved / "iter_0000004",
        )
        assert (saved / "latest_checkpointed_iteration.txt").read_text() == "2"

        ends = run(2, *ARGUMENTS, "--metrics-out", cut, "--save", saved, "--load", saved)
        assert [end.code for end in ends] == [0, 0], ends[0].errors
        assert losses(cut) == losses(whole)
        assert sorted(losses(cut)) == [1, 2, 3, 4, 5, 6]
