# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Options from a file, the file that a run writes, and the recipes."""

import argparse
import re
import sys

import pytest

from examples.mimo.common.config_file import write_config
from examples.mimo.common.errors import UserError
from examples.mimo.nemotron_vlm.data.reading_options import add_options
from examples.mimo.nemotron_vlm.loop import outputs
from examples.mimo.nemotron_vlm.loop import run as loop
from examples.mimo.nemotron_vlm.loop.run import run
from examples.mimo.nemotron_vlm.model.presets import find_preset, write_preset
from examples.mimo.nemotron_vlm.options.command_line import read
from examples.mimo.nemotron_vlm.options.own_options import OwnOptions
from examples.mimo.nemotron_vlm.options.run import Run
from examples.mimo.nemotron_vlm.planner.report import answer
from examples.mimo.pretrain_nemotron_vlm import ROOT
from megatron.training.arguments import parse_args
from tests.unit_tests.examples.nemotron_vlm import preloaded  # noqa: F401 (its parser is quick)
from tests.unit_tests.test_utilities import Utils

RECIPES = sorted((ROOT / "examples/mimo/recipes").glob("*.yaml"))
OPTIONS = """
lr: 1e-3
encoder_lr: [1e-4]
seq-length: 64
encoder: tp=2,dp=1
language: tp=1,dp=2
pack: true
micro_batch_size: 1
calculate_per_token_loss: true
bias_linear: false
overlap-grad-reduce: false
lr_wsd_decay_style: linear
"""


def options(tmp_path, text: str, *others: str, ranks: int = 2):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return Run.of(["--config", str(path), *others], ranks)


def settings(found) -> dict:
    return {name: value for name, value in vars(found.args).items() if name != "config"}


def test_a_file_means_the_same_as_the_command_line_and_the_command_line_wins(tmp_path):
    found = options(tmp_path, OPTIONS, "--encoder-lr", "3e-4", "--seq-length=96")
    line = "--lr 1e-3 --encoder-lr 3e-4 --seq-length 96 --encoder tp=2,dp=1 --language tp=1,dp=2"
    line += " --pack --micro-batch-size 1 --lr-wsd-decay-style linear"
    expected = Run.of(line.split(), 2)
    assert str(settings(found)) == str(settings(expected))
    assert found.args.lr == 1e-3 and found.args.encoder_lr == ["3e-4"]


def test_what_a_run_writes_starts_it_again(tmp_path):
    more = ("--no-squared-relu", "--cp-comm-type", "p2p", "--seed", "7")
    first = options(tmp_path, OPTIONS, *more, "--prompt", "${A} $${B} $C")
    write_config(tmp_path / "again.yaml", first.line.config)
    text = (tmp_path / "again.yaml").read_text()
    assert text.startswith("# overlay ") and "# adam_beta2: 0.95" in text
    again = Run.of(["--config", str(tmp_path / "again.yaml")], 2)
    assert str(settings(again)) == str(settings(first))
    assert not again.args.squared_relu and again.args.seed == 7


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("seq-lenght: 64", "run.yaml: no option seq-lenght; did you mean seq-length"),
        ("pack: maybe", "run.yaml: pack: it is a flag: want true or false, not maybe"),
        ("lr: [1, 2]", "run.yaml: lr: it takes one value, not a list"),
        ("lr: {a: 1}", "run.yaml: lr: want a value"),
        ("data: energon:${NO_SUCH}", "run.yaml: data: set the environment variable NO_SUCH"),
        ("[1, 2]", "want lines of OPTION: VALUE"),
        ("lr: [1", "no YAML"),
        ("--lerning-rate 1", "did you mean --lr"),
        ("--lora-rank 8", "--lora-rank.* did you mean --lora-dim.$"),
        ("--video-pruning-rate 0.5", "--video-pruning-rate.*: training keeps all rows of a clip"),
    ],
)
def test_a_file_or_a_line_that_cannot_work_is_refused_with_the_nearest_names(given, says, tmp_path):
    is_line = given.startswith("--")
    with pytest.raises(UserError, match=says) as refusal:
        options(tmp_path, "" if is_line else given, *given.split() if is_line else ())
    assert "\n" not in str(refusal.value)


def test_all_readers_of_the_command_line_see_the_file(tmp_path, monkeypatch):
    """Megatron reads it again where it sets up fault tolerance."""
    (tmp_path / "run.yaml").write_text("ft_num_warmup_iters: 7\nlr: 1e-3\nnum_workers: 3\n")
    monkeypatch.setattr(sys, "argv", ["program", "--config", str(tmp_path / "run.yaml")])
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(loop, "check_outputs", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run([*sys.argv[1:], "--lr", "2e-3"])
    args = parse_args(ignore_unknown_args=True)
    assert (args.ft_num_warmup_iters, args.lr, args.num_workers) == (7, 2e-3, 3)


@pytest.mark.parametrize(
    "line", ["--wandb-project a --wandb-exp-name b --save s", "--fault-injector-num-ranks 1"]
)
def test_a_package_that_is_missing_is_named_before_a_process_group_is_made(line, monkeypatch):
    monkeypatch.setattr(outputs, "find_spec", lambda name: None)
    option = line.split()[0]
    with pytest.raises(UserError, match=f"^{option}: .* is not installed; pip install"):
        outputs.check_outputs(Run.of(line.split(), 1).args)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_a_dry_run_and_keeps_few_checkpoints(recipe, tmp_path, monkeypatch):
    write_preset(find_preset("tiny"), tmp_path / "model.json")
    for name in ("WEIGHTS", "ALIGNED", "TOKENIZER", "OUT"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("DATA", str(tmp_path / "not-there"))  # a dry run counts shards that are
    given = ["--config", str(recipe), "--language", "cp=2"]
    found = Run.of(given, 2)
    assert found.args.save == f"{tmp_path}/checkpoints" and found.args.save_retain_interval
    Utils.destroy()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "predicted GiB" in answer(read([*given, "--dry-run", "2"]))
    with pytest.raises(UserError, match="multiple of --save-interval 300$"):
        Run.of([*given, "--save-interval", "300"], 2)
    monkeypatch.delenv("OUT")
    places = ("--save", "saved", "--load", "saved", "--metrics-out", "run/metrics.jsonl")
    places += ("--report", "run/report.html") if found.args.report else ()
    assert Run.of([*given, *places], 2).args.save == "saved"  # as train.sbatch


def test_help_is_one_screen_with_each_option_of_ours(capsys):
    run(["--help"])
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 30 and max(map(len, text.splitlines())) <= 100
    parser = argparse.ArgumentParser()
    add_options(parser, OwnOptions)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    own = [action.option_strings[-1] for action in shown if action.dest != "help"]
    assert not [name for name in own if not re.search(rf"{name}(?![\w-])", text)]


def test_help_all_has_megatrons_options_too(capsys):
    """Megatron's own help would fail: one of its texts has a sign that argparse expands."""
    with pytest.raises(SystemExit) as end:
        run(["--help-all"])
    said = capsys.readouterr().out
    assert not end.value.code and "--encoder-lr" in said and "--recompute-granularity" in said
