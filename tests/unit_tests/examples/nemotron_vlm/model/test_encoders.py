# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""A model of two encoders: its options, parts, inputs, parameters, and file of sizes.

That it trains as on one rank is in rows.py.
"""

import json
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from examples.mimo.common.errors import UserError
from examples.mimo.common.layout import COLOCATED, NON_COLOCATED, Batch, Layout, Layouts
from examples.mimo.nemotron_vlm.data.reading import Reader
from examples.mimo.nemotron_vlm.data.rows import PLACE, SAMPLE, Packing, Rows
from examples.mimo.nemotron_vlm.data.sample import IMAGES
from examples.mimo.nemotron_vlm.data.step_plan import StepPlan
from examples.mimo.nemotron_vlm.encoders import sound
from examples.mimo.nemotron_vlm.encoders.sound import HOP
from examples.mimo.nemotron_vlm.loop.dry_run import dry_run
from examples.mimo.nemotron_vlm.model.presets import find_preset, tiny, write_preset
from examples.mimo.nemotron_vlm.options.arguments import parse
from megatron.core.models.mimo.config.encoder_schedule import EncoderSchedule
from tests.unit_tests.examples.nemotron_vlm.loop.sound_and_images import (
    SOUND,
    STEP,
    SoundAndImages,
)
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import HAVE_CUDA, Utils, requires_world_size

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
        with pytest.raises(ValueError, match="a clip of 319 samples: give 320 or more"):
            SOUND.log_mel(torch.zeros(319))


@requires_world_size(1)
@pytest.mark.parametrize(
    ("options", "still"),
    [
        (("--freeze", "sound:encoder"), {"sound.encoders"}),
        (
            ("--freeze", "projector"),
            {"sound.input_projections", "images.input_projections"},
        ),
        (
            ("--encoder-lr", "sound:0", "--projector-lr", "images:0"),
            {"sound.encoders", "images.input_projections"},
        ),
    ],
)
def test_parts_of_one_encoder_or_of_all_have_their_own_settings(options, still):
    line = (*MODEL, "--micro-batch-size", "32", *options)
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


@pytest.mark.parametrize("packing", [None, Packing(window=32, multiple=8)])
def test_inputs_are_encoded_once_and_both_sides_agree_on_their_rows(packing):
    """Clips become different numbers of rows; most samples lack one encoder's inputs, or both."""
    layouts = Layouts((Layout(dp=4), Layout(dp=8)), Layout(dp=2), Batch(STEP, 1, 32))
    source, encoders = SoundAndImages(), find_preset("tiny-omni").encoders
    rows, count, at_once = Rows(source, "train", 32, packing), STEP // 2, 4
    reader = Reader(source, encoders, source.token_ids, 32, packing, False, 2, 1)
    encoded, consumed = ({name: {} for name in source.token_ids} for _ in range(2))
    for rank in range(8):
        parts, dp = {IMAGES: rank // 2, SOUND.name: rank}, rank // 4
        schedule = EncoderSchedule(macro_batch=at_once)
        plan = StepPlan(layouts, encoders, parts, dp, 64, sum, schedule)
        for number, take in enumerate(plan.takes(rows, 0, count, 1)):
            batch = reader[take]
            for encoder in encoders:
                name, share = encoder.name, take.shares[encoder.name]
                encoded[name][parts[name], number] = share
                consumed[name][dp, number] = share.consumed
                given = batch["modality_inputs"][name][encoder.key]
                is_sound = name == SOUND.name
                sizes = HOP * (given["lengths"] - 1) if is_sound else given["tiles"]
                made = batch["batch_plan"].encoded[name]
                assert made.counts.sum() == len(made.owners) == encoder.rows(sizes).sum()
    samples = rows.samples(0, count * layouts.language.dp)
    for encoder, layout in zip(encoders, layouts.encoders, strict=True):
        made, used = encoded[encoder.name], consumed[encoder.name]
        ranges = [part for share in made.values() for part in share.ranges]
        found = [(part.sample, place) for part in ranges for place in range(*part[1:])]
        every = np.concatenate(rows.inputs(samples, encoder, 64))[:, [SAMPLE, PLACE]]
        assert sorted(found) == sorted(map(tuple, every.tolist()))
        for first in range(0, count, at_once):
            numbers = range(first, first + at_once)
            atoms = [sum(made[part, n].encoded for n in numbers) for part in range(layout.dp)]
            wanted = [sum(used[dp, n] for n in numbers) for dp in range(layouts.language.dp)]
            assert np.concatenate(atoms).tolist() == np.concatenate(wanted).tolist()


@pytest.mark.skipif(HAVE_CUDA, reason="a dry run's process has no GPU")
def test_a_dry_run_has_the_parameters_of_each_encoder(monkeypatch):
    Utils.destroy()
    monkeypatch.setenv("WORLD_SIZE", "1")
    alone = dry_run([*MODEL, "--data", "mock"], 1)
    assert "\nsound encoder" in alone and "\nimages projector" in alone
    layouts = ("--encoder", "images:dp=8", "--encoder", "sound:dp=8", "--language", "pp=2")
    heads = dry_run([*MODEL, "--data", "mock", *layouts], 8).splitlines()[0]
    assert heads.split("  ")[1:] == [
        *("images encoder", "images projector", "sound encoder", "sound projector"),
        *("language", "sum"),
    ]


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
