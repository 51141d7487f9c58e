# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A model of two encoders: its options, parts, inputs, parameters, and file of sizes.

That it trains as on one rank is in rows.py.
"""

import json
from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import COLOCATED, NON_COLOCATED
from examples.mimo.nemotron_vlm.encoders import sound
from examples.mimo.nemotron_vlm.model.presets import find_preset, tiny, write_preset
from examples.mimo.nemotron_vlm.options.arguments import parse
from tests.unit_tests.examples.nemotron_vlm.loop.sound_and_images import SOUND, SoundAndImages
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import requires_world_size

MODEL = ("--model", "tiny-omni")


def parsed(line: str):
    return parse([*MODEL, *line.split()], world_size=8)


class TestOptions:
    @pytest.mark.parametrize(
        ("line", "layouts"),
        [
            ("--encoder sound:dp=8 --encoder images:tp=2", "images:tp=2,dp=4 sound:tp=1,dp=8"),
            ("", "images:tp=1,dp=8 sound:tp=1,dp=8"),
            ("--encoder dp=8 --encoder images:tp=4", "images:tp=4,dp=2 sound:tp=1,dp=8"),
            (
                f"--placement {NON_COLOCATED} --encoder images:tp=2,dp=2 --encoder sound:dp=2",
                "images:tp=2,dp=2 sound:tp=1,dp=2",
            ),
        ],
    )
    def test_each_encoder_has_its_layout(self, line, layouts):
        options = parsed(line)
        assert options.args.encoder == layouts
        is_apart = options.layouts.placement != COLOCATED
        assert options.layouts.offsets == ((0, 4, 6) if is_apart else (0, 0, 0))

    @pytest.mark.parametrize(
        ("line", "text"),
        [
            ("--encoder sonar:dp=8", "--encoder sonar:dp=8: no such encoder; choose from images, "),
            ("--encoder images:dp=8", "--encoder: sound is missing; add --encoder sound:AXIS"),
            ("--encoder sound:dp=8 --encoder sound:dp=8", "sound is given twice"),
            ("--encoder tp=2", "--encoder sound:tp=2,dp=4: tp=2 must divide the 1 encoder"),
            ("--encoder images:tp=2 --encoder dp=8 --encoder-tp 4", "says tp=2, and --encoder-tp"),
            (
                "--encoder images:dp=8 --encoder sound:tp=2",
                "--encoder sound:tp=2,dp=4: tp=2 must divide the 1 encoder.*tp=1,dp=8",
            ),
            (
                "--placement non-colocated --encoder images:dp=2 --encoder sound:pp=2,dp=1",
                "sound:.*: pp=2 must divide the 1 encoder of transformers",
            ),
            (
                "--placement non-colocated --encoder images:pp=2,dp=1 --encoder sound:dp=2",
                "several encoders on ranks of their own take as many stages each: pp=1. .*dp=1",
            ),
            ("--freeze radio:encoder", "no such part; .*, images:encoder, .*, sound:projector"),
            ("--encoder-lr sonar:1", "--encoder-lr sonar:1: no such encoder"),
            ("--encoder-lr sound:x", "--encoder-lr must be 0 or more, not x"),
            ("--freeze sound:encoder --encoder-lr sound:1", "does nothing with --freeze"),
        ],
    )
    def test_names_what_is_wrong_in_a_line(self, line, text):
        with pytest.raises(UserError, match=text) as refusal:
            parsed(line)
        assert "\n" not in str(refusal.value)

    def test_sound_needs_transformers(self, monkeypatch):
        monkeypatch.setattr(sound, "find_spec", lambda name: None)
        with pytest.raises(UserError, match="sound needs transformers: pip install"):
            parsed("")

    def test_a_clip_may_be_too_short(self):
        with pytest.raises(ValueError, match="a sound of 319 samples: give 320 or more"):
            SOUND.log_mel(torch.zeros(319))


@requires_world_size(1)
@pytest.mark.parametrize(
    ("options", "still"),
    [
        ("--freeze sound:encoder", {"sound.encoders"}),
        ("--freeze projector", {"sound.input_projections", "images.input_projections"}),
        (
            "--encoder-lr sound:0 --projector-lr images:0",
            {"sound.encoders", "images.input_projections"},
        ),
    ],
)
def test_parts_of_one_encoder_or_of_all_have_their_own_settings(options, still):
    line = (*MODEL, "--micro-batch-size", "32", *options.split())
    with trainer(*line, source=SoundAndImages()) as run:
        weights = {
            name.replace(".module.", ".").removeprefix("modality_submodules."): weight
            for name, weight in run.stages[0].modality_submodules.named_parameters()
        }
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        run.train_step()
        moved = Counter()
        for name, weight in weights.items():
            moved[".".join(name.split(".")[:2])] += not weight.equal(before[name])
    assert {part for part in moved if not moved[part]} == still
    assert len(moved) == 4


class TestModelFile:
    def test_reads_back_as_it_is_written(self, tmp_path):
        preset = find_preset("tiny-omni")
        write_preset(preset, tmp_path / "model.json")
        assert find_preset(str(tmp_path / "model.json")) == preset

    def test_of_one_encoder_is_read_as_it_was_written_before_there_were_several(self, tmp_path):
        sizes = asdict(tiny().images)
        ffn = {"projector_ffn": sizes.pop("projector_ffn")}
        old = {"name": "old", "encoder": sizes, **ffn, "language": asdict(tiny().language)}
        (tmp_path / "model.json").write_text(json.dumps(old | {"seq_length": 32}))
        assert find_preset(str(tmp_path / "model.json")) == replace(tiny(), name="old")
