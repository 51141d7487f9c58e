# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Scores of answers, by examples that were computed by hand."""

import base64

import pytest
from judging import Judged, mean_scores, write_page

from examples.mimo.nemotron_vlm.data.sample import Question


@pytest.mark.parametrize(
    "said, right, scores",
    [
        ("A cat.", "A cat.", (1, 1, 1)),
        ("the Cat", "A cat.", (0, 1, 0)),  # 4 edits of 7 letters: too few alike
        ("hallo", "Hello", (0, 0, 0.8)),
        ("kitten on the mat", "sitting on the mat", (0, 0, 1 - 3 / 18)),
        ("", "", (1, 1, 1)),
        ("", "word", (0, 0, 0)),
        ("B", "B", (1, 1, 1, 1)),
        ("(B) is right", "B.", (0, 0, 0, 1)),
        ("C", "(B)", (0, 0, 0, 0)),
    ],
)
def test_scores(said, right, scores):
    found = Judged("a", Question("?", [], answer=right), said).scores()
    assert tuple(found.values()) == pytest.approx(scores)
    assert ("choice_accuracy" in found) == (len(scores) == 4)


def test_the_page_has_all_and_the_wrong_first(tmp_path):
    media = [("image", {"a.png": b"picture"}), ("video", {"0.png": b"one", "1.png": b"two"})]
    judged = [
        Judged("right", Question("1 < 2?", media, answer="yes"), "yes"),
        Judged("wrong", Question("<image>?", [("sound", {"a.wav": b"noise"})], answer="B"), "<i>"),
    ]
    scores = mean_scores(judged)
    assert scores["exact_match"] == 0.5 and scores["choice_accuracy"] == 0  # of one sample
    write_page(tmp_path / "page.html", "saved", scores, judged)
    page = (tmp_path / "page.html").read_text()
    assert page.index(">wrong<") < page.index(">right<") and "1 &lt; 2?" in page
    assert "&lt;i&gt;" in page and "<i>" not in page
    for data in (b"picture", b"one", b"two", b"noise"):
        assert f'base64,{base64.b64encode(data).decode()}"' in page
