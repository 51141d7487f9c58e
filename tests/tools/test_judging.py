# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Scores of answers, by examples that were computed by hand."""

import pytest
from judging import mean_scores, scores_of


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
    found = scores_of(said, right)
    assert tuple(found.values()) == pytest.approx(scores)
    assert ("choice_accuracy" in found) == (len(scores) == 4)


def test_a_mean_is_of_the_samples_that_have_the_score():
    found = mean_scores([scores_of("yes", "yes"), scores_of("<i>", "B")])
    assert found["exact_match"] == 0.5 and found["choice_accuracy"] == 0
