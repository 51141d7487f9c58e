# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that go on with other options: the table "When options change" of docs/user/checkpoints.md.

Each row there has its cases here.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from examples.mimo.common.errors import UserError
from tests.unit_tests.examples.nemotron_vlm.energon import digits_data
from tests.unit_tests.examples.nemotron_vlm.loop.rows import PIPELINE, WORKERS, Row
from tests.unit_tests.examples.nemotron_vlm.loop.trajectories import check, trajectory
from tests.unit_tests.examples.nemotron_vlm.runs import trainer
from tests.unit_tests.test_utilities import Utils, requires_world_size

PAGE = Path(__file__).resolve().parents[5] / "docs" / "user" / "checkpoints.md"

RUN = "--train-iters 6 --micro-batch-size 4 --seq-length 64 --seed 3 --hybrid-layer-pattern ME*M"
RUN += " --encoder tp=2 --language dp=2 --data energon:{data} --tokenizer-model {data}/tokenizer"
RUN += " --global-batch-size 8"
BEFORE, AFTER = 2, 2
"""Steps before the save and after it; the second loss after it depends on the optimizer."""

RATES = "--encoder-lr {} --weight-decay {} --min-lr {}"
OWN_RATES, OTHER_RATES = RATES.format(2e-4, 20, 1e-5), RATES.format(5e-3, 0, 1e-3)


class GoesOn(NamedTuple):
    """The run goes on after the saved step, with the next sample.

    says: what the terminal names. tolerance: of the first loss, relative; None where the change
    gives another loss. same: whether all steps equal the steps of a run without a stop.
    """

    says: str = ""
    tolerance: float | None = 1e-5
    same: bool = False


STEPS = GoesOn(same=True)

ROWS = {
    "learning rates, weight decay, their schedule; also of a part": [
        ("--lr 5e-3 --train-iters 20", GoesOn("learning rates: lr 0.0001 → 0.005")),
        ("--encoder-lr 1e-3 --lr-decay-style linear", GoesOn("encoder_lr None → ['1e-3']")),
    ],
    "the same with `--use-checkpoint-opt_param-scheduler`": [
        (f"--lr 1e-3 {OTHER_RATES} --use-checkpoint-opt_param-scheduler", STEPS, OWN_RATES),
        (
            "--encoder-lr 1e-3 --use-checkpoint-opt_param-scheduler",
            "other parts had rates of their own .*None → ",
        ),
    ],
    "`--adam-beta1`, `--adam-beta2`, `--adam-eps`, `--clip-grad`": [
        ("--adam-eps 1e-6 --clip-grad 0.1", GoesOn("adam_eps 0.001 → 1e-06, clip_grad 1.0 → 0.1")),
    ],
    "the batch's size or its growth": [
        ("--global-batch-size 16", GoesOn("another batch: global_batch_size 8 → 16", None)),
    ],
    "how a step is carried out, saved and read": [
        (
            "--micro-batch-size 2 --num-workers 1 --no-balance --save-interval 3 "
            "--bad-samples refuse --long-samples cut",
            STEPS,
        ),
        ("--no-save-optim --no-save-rng", STEPS),
    ],
    "layout and placement": [
        ("--placement non-colocated --encoder dp=1 --language dp=1", STEPS),
    ],
    "the place of the data": [
        ("--data energon:{moved} --tokenizer-model {moved}/tokenizer", STEPS)
    ],
    "`--seq-length`, without packing": [
        ("--seq-length 96", STEPS),
        ("--seq-length 24", "--seq-length 24 in place of 64.*--finetune"),
    ],
    "the data, `--seed`, packing, image sizes, tokenizer, `--prompt`": [
        ("--data energon:{other}", "has other samples .*--finetune"),
        ("--seed 4", "--seed 4 in place of 3.*--finetune"),
        ("--pack --micro-batch-size 1", "--pack True in place of False.*--finetune"),
        ("--prompt Why?", "no survey of train"),
    ],
    "more parts in `--freeze`": [("--freeze encoder", GoesOn("frozen parts: freeze  → encoder"))],
    "fewer parts in `--freeze`": [
        ("--freeze '' --lr 1e-4", "encoder was frozen .*--finetune", "--freeze encoder")
    ],
    "what the model computes, its sizes": [
        ("--hidden-size 32", "another model was saved .*hidden_size 64 → 32.*--finetune"),
        ("--vocab-size 62 --finetune", "has a vocabulary of 64: --vocab-size must be 64"),
    ],
    "dropout, losses of the router": [
        ("--hidden-dropout 0.1", GoesOn("hidden_dropout 0.0 → 0.1", None)),
    ],
    "fp32 to `--bf16`, or back": [
        ("--bf16", GoesOn("another precision: bf16 False → True", 1e-2)),
        ("", GoesOn("another precision: bf16 True → False", 1e-2), "--bf16"),
    ],
    "to or from `--fp16`, `--no-use-distributed-optimizer`": [
        ("--fp16", "state there has another form .*--no-load-optim"),
        ("--no-use-distributed-optimizer", "-optimizer with --save or --load .*--no-load-optim"),
        ("--no-use-distributed-optimizer --no-load-optim", GoesOn("")),
    ],
    "`--ckpt-step` that is not there": [("--ckpt-step 7", "iter_0000007; steps there: 2")],
}
"""Options of the run that goes on and what happens, by the table's row: it goes on, or all ranks
refuse in one line, which has this pattern. A third member is options of the run that was saved."""

ELSEWHERE = [
    "another base, rank or layers of [adapters](adapters.md)",
    "the version of Megatron-LM, release or [next](../contributor/moving-the-pin.md)",
]
"""Rows whose cases are in tests/e2e/test_other_pin.py."""

CASES = [
    pytest.param(*(*case, "")[:3], id=" after ".join(case[::2]), marks=pytest.mark.shows(what))
    for what, cases in ROWS.items()
    for case in cases
]


@pytest.fixture(scope="module")
def places():
    """Data sets by the names that options have for them."""
    with digits_data.shared_digits(samples=96) as data:
        found = {name: data.with_name(name) for name in ("moved", "other")}
        with Utils.first_rank_first() as first:
            if first:
                shutil.copytree(data, found["moved"])
                digits_data.make_digits(found["other"], samples=96, seed=7)
                digits_data.survey(found["other"])
        yield found | {"data": data}


@pytest.fixture(scope="module")
def saved(places):
    """Return a checkpoint and the steps that follow it, by the options that it was saved with."""
    made = {}
    with Utils.shared_directory() as directory:

        def save(options: str) -> tuple[Path, list[dict]]:
            if options not in made:
                path = directory / str(len(made))
                with trainer(*words(options, places)) as run:
                    [run.train_step() for _ in range(BEFORE)]
                    run.save(path)
                    made[options] = path, [run.train_step() for _ in range(AFTER)]
            return made[options]

        yield save
        dist.barrier()  # a rank may still look at the files


def words(options: str, places: dict[str, Path]) -> list[str]:
    return [word.format(**places) for word in shlex.split(f"{RUN} {options}")]


@requires_world_size(2)
class TestChanges:
    @pytest.mark.parametrize(("options", "outcome", "before"), CASES)
    def test_goes_on_or_is_refused(self, options, outcome, before, saved, places, capsys):
        path, after = saved(before)
        line = [*words(options, places), "--load", str(path)]
        files = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
        if isinstance(outcome, str):
            with pytest.raises(UserError, match=outcome) as refusal, trainer(*line):
                pass
            assert "\n" not in str(refusal.value)
            assert "going on" not in capsys.readouterr().err
        else:
            self.assert_goes_on(line, outcome, after, capsys)
        assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == files

    def assert_goes_on(self, line, outcome, after, capsys):
        with trainer(*line) as run:
            assert (run.step, run.args.consumed_train_samples) == (BEFORE, BEFORE * 8)
            found = [run.train_step()["loss"] for _ in range(AFTER)]
        said = capsys.readouterr().err
        expected = [record["loss"] for record in after]
        if outcome.same:
            assert found == pytest.approx(expected, rel=1e-5)
        elif outcome.tolerance:
            assert found[0] == pytest.approx(expected[0], rel=outcome.tolerance)
            assert found[1] != expected[1]
        if Utils.rank == 0:
            assert f"going on after step {BEFORE}" in said
            assert outcome.says in said

    def test_another_stage_begins_anew(self, saved, places):
        line = words("--seed 4 --moe-router-topk 3 --finetune", places)
        with trainer(*line, "--load", str(saved("")[0])) as run:
            assert (run.step, run.args.consumed_train_samples) == (0, 0)

    def test_a_run_that_has_ended_does_not_write_its_checkpoint_again(self, saved, places):
        """Megatron saves at the end, whether or not a step was taken."""
        path, _ = saved("")
        files = {file: file.stat().st_mtime_ns for file in path.glob("iter_*/*")}
        line = words(f"--train-iters {BEFORE}", places)
        assert trajectory(*line, "--load", str(path), "--save", str(path)) == []
        assert {file: file.stat().st_mtime_ns for file in path.glob("iter_*/*")} == files


@requires_world_size(4)
def test_a_packed_trajectory_that_goes_on_in_another_layout_is_one_ranks(
    shared_path, record_property
):
    layout = "images:tp=2,dp=2 sound:dp=4", PIPELINE
    then = (("images:dp=4 sound:dp=4", "tp=2,dp=2,ep=2,etp=1", WORKERS),)
    row = Row(4, "packed shards of all media", *layout, then=then)
    with digits_data.shared_digits(samples=96) as data:
        check(row, record_property, shards=data, saved=shared_path)


def test_the_page_has_these_rows():
    table = PAGE.read_text().partition("## When options change\n")[2].partition("\n## ")[0]
    assert re.findall(r"(?m)^\| (.*?) \| ", table)[1:] == [*ROWS, *ELSEWHERE]
