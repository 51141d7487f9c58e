# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The page of a run or an evaluation: one HTML file, with all pictures and media inside."""

import base64
import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment

from examples.mimo.common.errors import UserError, one_line
from examples.mimo.common.layout import COLOCATED, Layout, parse_layout
from examples.mimo.nemotron_vlm.data.sample import Question, SampleSource
from examples.mimo.nemotron_vlm.loop.forward_step import Answers
from examples.mimo.nemotron_vlm.loop.metrics import numbers_of, read_metrics

CURVES = {
    "loss per token": {"loss": "training", "eval_loss": "held out"},
    "held-out accuracy": {"eval_accuracy": "accuracy", "eval_exact_match": "whole answers"},
    "seconds of a step": {"step_time_s": "step", "data_wait_s": "waiting for data"},
    "GiB of the last rank": {"memory_gib": "maximum"},
}
"""Names of metrics and their labels, by the title of a picture."""
LOGARITHMIC = "loss per token", "seconds of a step"
WIDTH, HEIGHT, POINTS = 400, 150, 500
"""Size of a picture's area, and about the most points of a curve."""

SHOWN = 6
"""Most wrong samples, and most right ones, on the page."""

LOOKED_AT = 256
"""Samples of the evaluation among which wrong ones are looked for."""

PAGE = Environment(autoescape=True, trim_blocks=True).from_string("""<!doctype html>
<meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
section { border-top: 1px solid #ccc; padding: 1rem 0; overflow: auto; max-height: 40rem }
img, video { max-width: 100%; max-height: 16rem; min-height: 3rem } small { color: #666 }
td, th { padding: 0 1rem 0 .3rem; text-align: left; vertical-align: top; overflow-wrap: anywhere }
td { white-space: pre-wrap } .wrong { color: #b00 } svg { width: 29rem; max-width: 100% }
text { font-size: 12px } .c0 { color: #06c } .c1 { color: #d50 }
</style>
<h1>{{ title }}</h1>
<table>{% for name, fact in facts.items() %}
<tr><th>{{ name }}</th><td>{{ fact }}</td></tr>{% endfor %}</table>
<section>{% for curve in curves if curve.lines %}
<svg viewBox="-60 -25 470 200" role="img"><text x="0" y="-10">{{ curve.title }}</text>
{% for y, label in curve.ticks.items() %}<path d="M0 {{ y }}H400" stroke="#ddd"/>
<text x="-5" y="{{ y + 4 }}" text-anchor="end">{{ label }}</text>{% endfor %}
<text x="0" y="170">step {{ curve.steps[0] }}</text>
<text x="400" y="170" text-anchor="end">{{ curve.steps[1] }}</text>
{% for label, points in curve.lines.items() %}<g class="c{{ loop.index0 }}" fill="currentColor">
<path d="{{ points }}" fill="none" stroke="currentColor" stroke-linecap="round" stroke-width="2"/>
<text x="{{ 130 * loop.index }}" y="-10">{{ label }}</text></g>{% endfor %}
</svg>{% endfor %}</section>
<section><h2>Which rank holds what</h2>
<p>Ranks of one colour hold the same weights of a module.</p>
<table><tr><th>rank</th>{% for name in held %}<th>{{ name }}</th>{% endfor %}</tr>
{% for rank in ranks %}<tr><th>{{ rank }}</th>{% for part in held.values() %}
{% set text, shade = part.get(rank, ('', '#fff')) %}
<td style="background: {{ shade }}">{{ text }}</td>
{% endfor %}</tr>{% endfor %}</table></section>
{% for each, media in samples %}<section>
<small>{{ each.name }}</small><br>
{% for kind, data in media %}{% if kind == 'sound' %}<audio controls src="{{ data }}"></audio>
{% elif kind == 'video' %}<video controls src="{{ data }}"></video>
{% else %}<img alt="" src="{{ data }}">{% endif %}{% endfor %}
<table><tr><th>asked</th><td>{{ each.question.text }}</td></tr>
<tr><th>said</th><td class="{{ '' if each.is_right else 'wrong' }}">{{ each.said }}</td></tr>
<tr><th>expected</th><td>{{ each.question.answer }}</td></tr>
</table></section>{% endfor %}
""")


class Shown(NamedTuple):
    """A held-out sample: its name, its question with the right answer, and what the model said."""

    name: str
    question: Question
    said: str
    is_right: bool


def write_page(
    file: Path,
    title: str,
    facts: dict[str, str],
    samples: Sequence[Shown],
    records: Sequence[dict],
    args: Namespace,
) -> None:
    """Write a page that needs no other file, the wrong answers first.

    Args:
        facts: shown in a table, by name.
        records, args: of the run; there may be no records.

    Raises:
        UserError: the file cannot be written.
    """
    text = PAGE.render(
        title=title,
        facts=facts,
        curves=[_curve(*each, records) for each in CURVES.items()],
        held=holdings(args),
        ranks=range(args.world_size),
        samples=[(e, _media(e.question)) for e in sorted(samples, key=lambda e: e.is_right)],
    )
    try:
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"{file}: cannot write it: {error.strerror}") from error


def write_report(args: Namespace, source: SampleSource, answers: Answers) -> str:
    """Write the page that ``--report`` names; return its link, or why there is none.

    The run has ended well then, all the same.
    """
    try:
        records = read_metrics(args.metrics_out)
        layout = f"{args.placement}: encoder {args.encoder}, language {args.language}"
        facts = {"data": args.data, "layout": layout, "steps": str(len(records))}
        facts |= numbers_of(records[-1]) if records else {}
        title = f"{args.model} on {args.world_size} ranks"
        write_page(args.report, title, facts, readings(source, answers), records, args)
    except Exception as error:  # whatever a source of a user's raises
        return f"warning: no page: {one_line(error)}"
    return f"page: {args.report.absolute().as_uri()}"


def readings(source: SampleSource, answers: Answers) -> list[Shown]:
    """Return held-out samples that the model has read, up to `SHOWN` wrong ones and right ones."""
    read: dict[int, list[int]] = {}
    for (number, _), token in sorted(answers.items()):
        read.setdefault(number, []).append(token)
    found: dict[bool, list[Shown]] = {False: [], True: []}
    for number in list(read)[:LOOKED_AT]:
        text = source.text("test", number)
        labels = text.labels[text.loss_mask.bool()].tolist()
        is_right = read[number] == labels
        if len(found[is_right]) < SHOWN:
            question = source.shown("test", number)._replace(answer=source.words(labels))
            name, said = source.name("test", number), source.words(read[number])
            found[is_right].append(Shown(name, question, said, is_right))
    return found[False] + found[True]


def _curve(title: str, names: dict[str, str], records: Sequence[dict]) -> dict:
    """Return what the page draws of some metrics: no lines if no record has a number."""
    scale, least = (math.log10, 0) if title in LOGARITHMIC else (float, -1)
    known = {
        label: [(r["step"], scale(r[k])) for r in records if r.get(k) is not None and r[k] > least]
        for k, label in names.items()
    }
    values = [value for line in known.values() for _, value in line] or [0]
    low, high = min(values) if least == 0 else 0, max(values)
    height = HEIGHT / ((high - low) or 1)
    steps = [record["step"] for record in (*records[:1], *records[-1:])] or [0, 0]
    width = WIDTH / max(1, steps[1] - steps[0])
    lines = {}
    for label, line in known.items():
        thin = line[:: len(line) // POINTS + 1] + line[-1:]
        at = (f"{width * (x - steps[0]):.1f} {height * (high - y):.1f}" for x, y in thin)
        lines |= {label: "M" + "L".join(at)} if line else {}
    marks = [high - (high - low) * part for part in (0, 0.5, 1)]
    ticks = {height * (high - y): f"{10**y if least == 0 else y:.3g}" for y in marks}
    return {"title": title, "lines": lines, "ticks": ticks, "steps": steps}


def holdings(args: Namespace) -> dict[str, dict[int, tuple[str, str]]]:
    """Return what ranks hold of each module: the place on its axes, and a colour of the weights."""
    parts = [part.rpartition(":") for part in args.encoder.split()]
    modules = {name or "encoder": parse_layout(text, "encoder") for name, _, text in parts}
    modules["language"] = language = parse_layout(args.language, "language")
    stages = args.hybrid_layer_pattern.partition("/")[0].split("|")
    if len(stages) != language.pp * language.vpp:  # upstream's uneven pipelines have no bars
        stages = []
    found, first = {}, 0
    for name, layout in modules.items():
        layers = stages if layout is language else []
        ranks = range(layout.size)
        found[name] = {first + rank: _holding(layout, rank, layers) for rank in ranks}
        first += 0 if args.placement == COLOCATED else layout.size
    return found


def _holding(layout: Layout, rank: int, stages: Sequence[str]) -> tuple[str, str]:
    """Return a rank's place in a layout with the layers of its stages, and its weights' colour."""
    etp = layout.etp or layout.tp
    place, rest = {"ep": rank // etp % layout.ep}, rank
    for axis in ("tp", "cp", "dp", "pp"):
        rest, place[axis] = divmod(rest, getattr(layout, axis))
    shard = (place["pp"] * layout.tp + place["tp"]) * layout.ep + place["ep"]
    shard = shard * etp + rank % etp
    shown = [f"{axis}{number}" for axis, number in place.items() if getattr(layout, axis) > 1]
    hue = 360 * shard / (layout.pp * layout.tp * layout.ep * etp)
    return " ".join([*shown, *stages[place["pp"] :: layout.pp]]), f"hsl({hue:.3f} 70% 85%)"


def _media(question: Question) -> list[tuple[str, str]]:
    """Return kind and data URI of each file; the frames of a clip are images."""
    found = []
    for kind, files in question.media:
        shown = {"image": "image/png", "sound": "audio/wav", "video": "video/mp4"}
        kind = "image" if kind == "video" and len(files) > 1 else kind
        for data in files.values():
            found.append((kind, f"data:{shown[kind]};base64,{base64.b64encode(data).decode()}"))
    return found
