# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The page of a run has its curves, its layout and its samples, and needs no other file."""

import base64
import io
import re
from argparse import Namespace
from collections import Counter

import numpy as np
import torch
from PIL import Image

from examples.mimo.nemotron_vlm.data.sample import SampleSource, Text
from examples.mimo.nemotron_vlm.loop.page import SHOWN, holdings, write_report

RUN = {"model": "tiny", "data": "digits", "placement": "colocated", "world_size": 16}
RUN |= {"hybrid_layer_pattern": "ME|M*|EE|-/*E", "encoder": "images:tp=4,dp=4 sound:dp=16"}
RUN |= {"language": "tp=2,cp=2,pp=2,dp=2,ep=4,etp=1,vpp=2"}
"""Arguments of a run on 16 ranks."""


class Coloured(SampleSource):
    """Samples of two pictures of a dark colour, with the number as their answer."""

    def text(self, split: str, number: int) -> Text:
        return Text(torch.tensor([1, 2]), torch.tensor([2, number]), torch.tensor([0.0, 1.0]))

    def tiles(self, split: str, number: int) -> torch.Tensor:
        return torch.tensor([17, 34, 51], dtype=torch.uint8)[:, None, None].expand(2, 3, 8, 12)


def test_a_run_shows_its_curves_and_wrong_and_right_samples(tmp_path):
    args = Namespace(**RUN, report=tmp_path / "a.html", metrics_out=tmp_path / "metrics.jsonl")
    step = '{"step": %d, "loss": %s, "step_time_s": 0.5, "data_wait_s": 0, "memory_gib": 2}\n'
    args.metrics_out.write_text(step % (1, 8.0) + step % (2, "null") + step % (3, 0.5))
    answers = {(number, 1): number - number % 2 for number in range(50)}
    assert write_report(args, Coloured(), answers) == f"page: {args.report.as_uri()}"
    page = args.report.read_text()
    assert not re.search(r'(src|href)="(?!data:)|url\(|<(script|link|iframe)', page)
    opened = Counter(re.findall(r"<(\w+)[^>]*(?<!/)>", page))
    opened.subtract(re.findall(r"</(\w+)>", page))
    assert {tag for tag, left in opened.items() if left} <= {"br", "img", "meta"}
    curves = re.findall('<path d="([^"]*)" fill', page)
    assert curves[0] == "M0.0 0.0L400.0 150.0L400.0 150.0"
    assert "loss0.5" in re.sub("<[^>]*>", "", page)
    assert page.count("<svg") == len(curves) == 3  # nobody has evaluated
    assert (page.count("<img"), page.count('"wrong"')) == (4 * SHOWN, SHOWN)
    picture = base64.b64decode(re.search('src="data:[^,]*,([^"]*)"', page)[1])
    assert (np.asarray(Image.open(io.BytesIO(picture))) == [17, 34, 51]).all()


def test_a_page_that_cannot_be_written_does_not_fail_the_run(tmp_path):
    args = Namespace(**RUN, report=tmp_path / "no/a.html", metrics_out=tmp_path / "no")
    said = write_report(args, Coloured(), {})
    assert said.startswith(f"warning: no page: {args.report}: cannot write it: ")


def test_ranks_hold_what_the_grids_give_them():
    """Order of axes: tp, cp, dp, pp; of experts: tp, ep, dp, pp."""
    held, colours = holdings(Namespace(**RUN)), {}
    dense, experts = np.arange(16).reshape(2, 2, 2, 2), np.arange(16).reshape(2, 2, 4, 1)
    for rank in range(16):
        (pp, dp, cp, tp), (_, _, ep, _) = (np.argwhere(of == rank)[0] for of in (dense, experts))
        text, colour = held["language"][rank]
        assert text == f"ep{ep} tp{tp} cp{cp} dp{dp} pp{pp} {('ME EE', 'M* -')[pp]}"
        assert colours.setdefault((pp, tp, ep), colour) == colour
    assert len({*colours.values()}) == len(colours)
    assert [held["images"][rank][0] for rank in (0, 3, 4)] == ["tp0 dp0", "tp3 dp0", "tp0 dp1"]
    apart = holdings(Namespace(**RUN | {"placement": "non-colocated"}))
    assert [rank for ranks in apart.values() for rank in ranks] == list(range(48))
