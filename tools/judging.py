# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Scores of answers."""

import re
from statistics import fmean

LEAST_SIMILARITY = 0.5
"""Answers that are less similar score 0 in ANLS."""

ARTICLES = re.compile(r"\b(a|an|the)\b")
CHOICE = re.compile(r"\W*([A-Z])\W*")
"""A whole answer that is a letter, as in ``(B)`` or ``B.``."""


def scores_of(said: str, right: str) -> dict[str, float]:
    """Return scores of what was said, 0 … 1; `choice_accuracy` if the right answer is a letter."""
    right = right.strip()
    scores = {
        "exact_match": float(said == right),
        "normalized_match": float(normalized(said) == normalized(right)),
        "anls": anls(said, right),
    }
    if letter := CHOICE.fullmatch(right):
        first = re.search(r"\b([A-Z])\b", said)
        scores["choice_accuracy"] = float(bool(first) and first[1] == letter[1])
    return scores


def normalized(text: str) -> str:
    """Return a text in lower case, without punctuation and articles, as SQuAD's evaluation does."""
    words = re.sub(r"[^\w\s]", "", text.lower())
    return " ".join(ARTICLES.sub(" ", words).split())


def anls(said: str, right: str) -> float:
    """Return the normalized Levenshtein similarity, 0 below one half (Biten et al., 2019)."""
    said, right = " ".join(said.lower().split()), " ".join(right.lower().split())
    longest = max(len(said), len(right))
    similarity = 1 - edits(said, right) / longest if longest else 1.0
    return similarity if similarity >= LEAST_SIMILARITY else 0.0


def edits(one: str, other: str) -> int:
    """Return the Levenshtein distance of two texts."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        before, row[0] = row[0], number
        for place, wanted in enumerate(other, 1):
            change = before + (letter != wanted)
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, change)
    return row[-1]


def mean_scores(scores: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each score over the samples that have it."""
    names = dict.fromkeys(name for each in scores for name in each)
    return {name: fmean(each[name] for each in scores if name in each) for name in names}
