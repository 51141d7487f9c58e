# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The picture at the end of a run shows what the data has."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from examples.mimo.nemotron_vlm.data.sample import Text
from examples.mimo.nemotron_vlm.loop.report import draw_report, readings

COLOURS = [(255, 0, 0), (0, 128, 0), (0, 0, 255), (255, 255, 0), (200, 200, 200), (17, 34, 51)]


@pytest.mark.parametrize("colour", COLOURS)
def test_images_have_their_colours(colour, tmp_path):
    """A grey one too: dark stays dark."""
    picture = torch.tensor(colour, dtype=torch.uint8)[:, None, None].expand(3, 8, 12)
    text = Text(torch.tensor([1, 2]), torch.tensor([2, 3]), torch.tensor([0.0, 1.0]))
    source = SimpleNamespace(
        pictures=lambda *_: [picture, picture[:, :4, :4]],  # the second is enlarged
        text=lambda *_: text,
        words=str,
    )
    (shown,) = readings(source, {(0, 1): 3}, 1)
    assert shown.strip.shape == (8, 20, 3)
    draw_report(tmp_path / "report.png", [], [shown])
    drawn = np.asarray(Image.open(tmp_path / "report.png").convert("RGB")).reshape(-1, 3)
    assert (np.abs(drawn.astype(int) - colour).max(1) <= 1).sum() > 1000
