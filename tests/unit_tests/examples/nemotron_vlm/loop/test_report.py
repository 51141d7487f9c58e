# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The page of a run has its curves, its layout and its samples, and needs no other file."""

import base64
import io
import re
import shutil
import subprocess
from argparse import Namespace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from examples.mimo.nemotron_vlm.data.sample import Question, SampleSource, Text
from examples.mimo.nemotron_vlm.loop.page import SHOWN, Shown, holdings, write_page, write_report

RUN = {"model": "tiny", "data": "digits", "placement": "colocated", "world_size": 16}
RUN |= {"hybrid_layer_pattern": "ME|M*|EE|-/*E", "encoder": "images:tp=4,dp=4 sound:dp=16"}
RUN |= {"language": "tp=2,cp=2,pp=2,dp=2,ep=4,etp=1,vpp=2"}
"""Arguments of a run on 16 ranks."""


class Page(HTMLParser):
    """A page's attributes by tag, and its text; a tag that is not closed is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found, self.words, self._open = {}, "", []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.found.setdefault(tag, []).append(dict(attributes))
        self._open += [tag] * (tag not in ("br", "img", "meta"))

    def handle_endtag(self, tag: str) -> None:
        assert tag == self._open.pop()

    def handle_data(self, data: str) -> None:
        self.words += data


def read_page(path: Path) -> Page:
    """Read a page, in a browser too if there is one; it must name no other file."""
    page = Page(text := path.read_text())
    assert not re.search(r'(src|href)="(?!data:)|url\(|<(script|link|iframe)', text)
    if browser := shutil.which("chromium"):
        words = [browser, "--headless", "--no-sandbox", "--dump-dom", path.as_uri()]
        shown = Page(subprocess.check_output(words, text=True, timeout=60)).found
        assert all(len(shown[tag]) == len(page.found[tag]) for tag in page.found)
    return page


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
    page = read_page(args.report)
    curves = [each["d"] for each in page.found["path"] if "fill" in each]
    assert curves[0] == "M0.0 0.0L400.0 150.0L400.0 150.0" and "loss0.5" in page.words
    assert len(page.found["svg"]) == len(curves) == 3  # nobody has evaluated
    wrong = sum(each.get("class") == "wrong" for each in page.found["td"])
    assert (len(page.found["img"]), wrong) == (4 * SHOWN, SHOWN)
    file = io.BytesIO(base64.b64decode(page.found["img"][0]["src"].partition(",")[2]))
    assert (np.asarray(Image.open(file)) == [17, 34, 51]).all()


def test_a_page_has_all_media_and_the_wrong_answer_first(tmp_path):
    media = [("image", {"a.png": b"picture"}), ("video", {"0.png": b"one", "1.png": b"two"})]
    wrong = Question("<image>?", [("sound", {"a.wav": b"noise"})], answer="B")
    shown = [Shown("right", Question("1 < 2?", media, answer="yes"), "yes", True)]
    shown.append(Shown("wrong", wrong, "<i>", False))
    write_page(tmp_path / "page.html", "a", {"anls": "0.5"}, shown, [], Namespace(**RUN))
    page = read_page(tmp_path / "page.html")
    assert "1 < 2?" in page.words and "saidyes" in page.words.split() and "svg" not in page.found
    assert page.words.index("wrong") < page.words.index("said<i>") < page.words.index("right")
    found = [each["src"] for tag in ("img", "audio") for each in page.found[tag]]
    files = [base64.b64decode(each.partition(",")[2]) for each in found]
    assert files == [b"picture", b"one", b"two", b"noise"]


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
