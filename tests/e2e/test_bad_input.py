# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Bad input: one line with the fact and the fix, exit code 2 on every rank, nothing written."""

from pathlib import Path

import pytest
import torch

from tests.e2e.launch import run

FILE = Path(__file__)


def assert_refused(ends, *texts: str) -> None:
    assert [end.code for end in ends] == [2] * len(ends), [end.errors for end in ends]
    (line,) = [line for end in ends for line in end.error_lines]
    for text in texts:
        assert text in line
    assert not any("end of arguments" in end.output for end in ends), "the dump hides the line"


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--language", "tp=3"], ["tp=3 must divide", "Nearest that fit: "]),
        (["--save", FILE / "saved"], ["--save", "cannot write there (Not a directory)"]),
        (["--load", FILE.parent], [f"--load {FILE.parent}: no checkpoint there"]),
        pytest.param(
            ["--device", "cuda"],
            ["PyTorch finds no GPU here"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_an_option_that_cannot_work_is_refused(arguments, texts, tmp_path):
    ends = run(2, "--save", tmp_path / "saved", *arguments)
    assert_refused(ends, *texts)
    assert not list(tmp_path.glob("saved/*"))


def test_a_loss_that_is_not_finite_is_one_line_with_the_cure():
    ends = run(2, "--train-iters", "4", "--lr", "1e30")
    assert [end.code for end in ends] == [16, 16], [end.errors for end in ends]
    (line,) = [line for end in ends for line in end.error_lines]
    assert "the loss of a step is not finite" in line and "lower --lr" in line


def test_a_damaged_checkpoint_is_refused(tmp_path):
    """The run before has written its report and its options."""
    page, metrics = tmp_path / "report.html", tmp_path / "metrics.jsonl"
    report = ("--eval-iters", "1", "--report", page, "--metrics-out", metrics)
    ends = run(1, *report, "--train-iters", "2", "--save-interval", "1", "--save", tmp_path)
    assert ends[0].code == 0, ends[0].errors
    assert page.read_text().count("<svg") == 4 and f"page: {page.as_uri()}\n" in ends[0].errors
    assert f"\nsave: {tmp_path}\n" in (tmp_path / "config.yaml").read_text()
    files = tmp_path.glob("iter_0000002/*.distcp")
    damaged = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    before = (tmp_path / "config.yaml").read_text()
    ends = run(2, "--load", tmp_path, "--save", tmp_path, "--log-file", tmp_path / "log.txt")
    assert_refused(ends, "is damaged", damaged.name, "--ckpt-step 1")
    assert (tmp_path / "config.yaml").read_text() == before
