# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A source of the user's own: the class of docs/user/your-own-source.md, and bad parameters."""

import re
from argparse import Namespace
from pathlib import Path

import pytest

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data import make_source, seen_from
from examples.mimo.nemotron_vlm.planner.plan import rows_of
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import make_digits
from tests.unit_tests.examples.nemotron_vlm.runs import options_of, trainer

PAGE = Path(__file__).resolve().parents[5] / "docs/user/your-own-source.md"


@pytest.fixture
def options(tmp_path, monkeypatch) -> list[str]:
    """Make what the page assumes; return options of a run that has a tokenizer."""
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.DOTALL)
    (tmp_path / "sums.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    make_digits(tmp_path / "digits", 24, seed=1)
    return ["--tokenizer-model", str(tmp_path / "digits/tokenizer"), "--seq-length", "48"]


def test_the_class_of_the_page_trains_and_takes_its_parameters(options):
    with trainer("--data", "sums.Sums:most=20,ask=copy", *options, "--eval-iters", "1") as run:
        assert run.train_step()["loss"] > 0
        source = run.source
        assert rows_of(run.args, run.session.run.preset)[0][0].sizes.any()
    texts = [source.text("test", number) for number in range(20)]
    answers = [source.words(text.labels[text.loss_mask > 0].tolist()) for text in texts]
    assert answers == [source.question("test", number).answer for number in range(20)]
    assert 20 < max(int(each.replace(" ", "")) for each in answers) <= 40
    assert source.question("test", 0).text == "<image>copy"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("sums.Sums", "most is missing; Sums takes most: int, ask: str = 'read'"),
        ("sums.Sums:most=3,top=4", "no parameter top; Sums takes most: int, ask"),
        ("sums.Sums:most=few", "most=few is no int; Sums takes most: int, ask"),
        ("mock:most=3", "MockStrips takes no parameters"),
        ("sums.Sum", "no such data; choose from digits, .*has no attribute 'Sum'"),
        ("letters.Sums", "no such data; .*No module named 'letters'"),
        ("sums.Sums:most=3", "needs --tokenizer-model"),
        ("sums.Sums:most=3", "tokens do not fit --seq-length 16$"),
    ],
)
def test_a_bad_parameter_is_one_line(data, error, options):
    given = options[2:] if "tokenizer" in error else options
    chosen = options_of("--data", data, *given, *(["--seq-length", "16"] if "fit" in error else []))
    with pytest.raises(UserError, match=f"^--data {re.escape(data)}.*{error}") as refused:
        make_source(chosen.args, chosen.preset)
    assert "\n" not in str(refused.value)


def test_paths_of_a_run_name_the_same_files_from_any_folder(tmp_path):
    """A folder may have a preset's name, and a name may be too long for a path."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "a.jsonl").touch()
    others = {"tokenizer_model": "a" * 300, "surveys": None, "pretrained_checkpoint": "none"}
    args = Namespace(model="tiny", data="energon:a.jsonl", **others)
    seen_from(tmp_path, args)
    assert args == Namespace(model="tiny", data=f"energon:{tmp_path}/a.jsonl", **others)
