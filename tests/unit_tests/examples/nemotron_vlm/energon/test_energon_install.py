# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The extra that --data energon needs, and the tool that makes a data set for it."""

import importlib
import importlib.util

import numpy as np
import pytest

import examples.mimo.nemotron_vlm.energon as package
from examples.mimo.nemotron_vlm.data.digits import DigitStrips
from examples.mimo.nemotron_vlm.data.sample import SampleSource
from examples.mimo.nemotron_vlm.energon.conversation import Chat, Turn
from tests.unit_tests.examples.nemotron_vlm.energon.digits_data import (
    SEQ_LENGTH,
    TILE,
    TOKENS_PER_TILE,
    make_digits_webdataset,
    source,
)


@pytest.mark.parametrize("error", [None, ModuleNotFoundError("No module named 'megatron'")])
def test_a_missing_package_is_refused_with_the_extra(monkeypatch, error):
    find = importlib.util.find_spec

    def without_energon(name: str):
        if name != "megatron.energon":
            return find(name)
        if error:
            raise error

    monkeypatch.setattr(importlib.util, "find_spec", without_energon)
    with pytest.raises(ImportError, match=r"needs megatron.energon; .* pip install '.\[energon\]'"):
        importlib.reload(package)


def test_the_tool_does_not_write_over_data(digits, capsys):
    assert make_digits_webdataset.main([str(digits), "--samples", "8", "--seed", "0"]) == 2
    assert "is there already" in capsys.readouterr().err


def test_the_tools_tokenizer_has_a_token_for_each_digit(digits):
    chat = Chat(digits / "tokenizer")
    ids, answer = chat.encode([Turn("user", "copy 12 ?"), Turn("assistant", "12")])
    assert chat._tokenizer.convert_ids_to_tokens(ids) == [
        "<s>", "<user>", "copy", "1", "2", "?", "<assistant>", "1", "2", "</s>",
    ]  # fmt: skip
    assert answer.tolist() == [False] * 7 + [True] * 3
    assert ids[3:5].tolist() == [11, 12]


class TestATinyModelCanLearnTheData:
    """The data has what its 350 steps need; with less, the model is still at chance after them."""

    def test_the_answer_follows_the_image(self, digits):
        opened = source(digits)
        turns = [Turn("user", "copy"), Turn("assistant", "1")]
        asked = Chat(digits / "tokenizer").encode(turns).ids[3]
        for number in range(opened.epoch_size("train")):
            ids = opened.text("train", number).input_ids
            if images := (ids == opened.image_token).nonzero().flatten().tolist():
                assert ids[images[-1] + 1] == asked

    def test_digits_stand_alone_as_often_as_in_the_data_of_make_train(self, digits):
        sizes = {"tile": TILE, "tokens_per_tile": TOKENS_PER_TILE, "seq_length": SEQ_LENGTH}
        alone = [_alone(source(digits), 84), _alone(DigitStrips(**sizes, seed=1), 1000)]
        assert alone[0] >= alone[1]


def _alone(opened: SampleSource, samples: int) -> float:
    """Share of the digits in images that are the only one of their image."""
    texts = [opened.text("train", number) for number in range(samples)]
    shown = [text for text in texts if (text.input_ids == opened.image_token).any()]
    digits = np.array([int(text.loss_mask.sum()) - 1 for text in shown])
    return (digits == 1).sum() / digits.sum()
