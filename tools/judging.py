# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Scores of answers, and a page that shows them."""

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from jinja2 import Environment

from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data.sample import Question

LEAST_SIMILARITY = 0.5
"""Answers that are less similar score 0 in ANLS."""

ARTICLES = re.compile(r"\b(a|an|the)\b")
CHOICE = re.compile(r"\W*([A-Z])\W*")
"""A whole answer that is a letter, as in ``(B)`` or ``B.``."""


@dataclass(frozen=True)
class Judged:
    """A sample's name, its question with the right answer, and what the model said."""

    name: str
    question: Question
    said: str

    def scores(self) -> dict[str, float]:
        """Return the answer's scores, 0 … 1; `choice` only where the right answer is a letter."""
        right, said = self.question.answer.strip(), self.said
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


def mean_scores(judged: list[Judged]) -> dict[str, float]:
    """Return the mean of each score over the samples that have it."""
    scores = [each.scores() for each in judged]
    names = dict.fromkeys(name for each in scores for name in each)
    return {name: fmean(each[name] for each in scores if name in each) for name in names}


PAGE = """<!doctype html>
<meta charset="utf-8"><title>Evaluation</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
section { border-top: 1px solid #ccc; padding: 1rem 0; overflow: auto }
img, video { max-width: 100%; max-height: 16rem } td, th { padding: 0 1rem 0 0; text-align: left }
td { white-space: pre-wrap; vertical-align: top } .wrong { color: #b00 } small { color: #666 }
</style>
<h1>Evaluation</h1><p>{{ checkpoint }}</p>
<table>{% for name, value in scores.items() %}
<tr><th>{{ name.replace('_', ' ') }}</th><td>{{ '%.3g' % value }}</td></tr>{% endfor %}</table>
{% for each, media, right in samples %}<section>
<small>{{ each.name }}</small><br>
{% for kind, data in media %}{% if kind == 'sound' %}<audio controls src="{{ data }}"></audio>
{% elif kind == 'video' %}<video controls src="{{ data }}"></video>
{% else %}<img alt="" src="{{ data }}">{% endif %}{% endfor %}
<table><tr><th>asked</th><td>{{ each.question.text }}</td></tr>
<tr><th>said</th><td class="{{ '' if right else 'wrong' }}">{{ each.said }}</td></tr>
{% if not right %}<tr><th>expected</th><td>{{ each.question.answer }}</td></tr>{% endif %}
</table></section>{% endfor %}
"""


def write_page(file: Path, checkpoint: str, scores: dict, judged: list[Judged]) -> None:
    """Write a page with all media inside, the wrong answers first.

    Raises:
        UserError: the file cannot be written.
    """
    samples = [(each, _media(each.question), each.scores()["normalized_match"]) for each in judged]
    samples.sort(key=lambda sample: sample[2])
    page = Environment(autoescape=True).from_string(PAGE)
    try:
        file.write_text(page.render(checkpoint=checkpoint, scores=scores, samples=samples))
    except OSError as error:
        raise UserError(f"--out {file}: cannot write it: {error.strerror}") from error


def _media(question: Question) -> list[tuple[str, str]]:
    """Return kind and data URI of each file; the frames of a clip are images."""
    found = []
    for kind, files in question.media:
        shown = {"image": "image/png", "sound": "audio/wav", "video": "video/mp4"}
        kind = "image" if kind == "video" and len(files) > 1 else kind
        for data in files.values():
            found.append((kind, f"data:{shown[kind]};base64,{base64.b64encode(data).decode()}"))
    return found
