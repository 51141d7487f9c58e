# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Bad input: one line with the fact and the fix, exit code 2 on every rank, nothing written."""

from pathlib import Path

import pytest
import torch

from tests.e2e.launch import run

FILE = Path(__file__)


def assert_refused(arguments: list[str | Path], *texts: str) -> None:
    codes, said = run(2, *arguments)
    assert codes == [2, 2], said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    for text in texts:
        assert text in line
    assert "end of arguments" not in said, "the dump hides the line"


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
    assert_refused(["--save", tmp_path / "saved", *arguments], *texts)
    assert not list(tmp_path.glob("saved/*"))


def test_a_loss_that_is_not_finite_is_one_line_with_the_cure():
    codes, said = run(2, "--train-iters", "4", "--lr", "1e30")
    assert codes == [16, 16], said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "the loss of a step is not finite" in line and "lower --lr" in line


def test_a_damaged_checkpoint_is_refused(tmp_path):
    """The run before has written its report and its options."""
    page, metrics = tmp_path / "report.html", tmp_path / "metrics.jsonl"
    report = ("--eval-iters", "1", "--report", page, "--metrics-out", metrics)
    codes, said = run(1, *report, "--train-iters", "2", "--save-interval", "1", "--save", tmp_path)
    assert codes == [0], said
    assert page.read_text().count("<svg") == 4 and f"page: {page.as_uri()}\n" in said
    before = (tmp_path / "config.yaml").read_text()
    assert f"\nsave: {tmp_path}\n" in before
    files = tmp_path.glob("iter_0000002/*.distcp")
    damaged = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    again = ["--load", tmp_path, "--save", tmp_path, "--log-file", tmp_path / "log.txt"]
    assert_refused(again, "is damaged", damaged.name, "--ckpt-step 1")
    assert (tmp_path / "config.yaml").read_text() == before
